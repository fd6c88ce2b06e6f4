"""`StepSampler`: what the rows of a step want of their logits, for the kernel, and the records of what it found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.kernels.sampling import record
from realizar.backends.cpu.kernels.sampling.record import RUN
from realizar.backends.cpu.records import address
from realizar.backends.cpu.sampling.kernel import SamplingKernel
from realizar.backends.cpu.sampling.rows import SamplingRows
from realizar.backends.cpu.sampling.runs import ALL, DecodeRuns, StepRuns
from realizar.backends.row_faults import nothing_allowed, unusable_logit, unusable_logits
from realizar.batch import NOT_SAMPLED, StepOutput, StepRows
from realizar.errors import RealizarError
from realizar.logprob_columns import LogprobColumns, StepEntry
from realizar.outputs import RowError, TokenLogprobs

Integers = NDArray[np.integer]
Pooled: TypeAlias = NDArray[np.float32] | RowError | None
"""The hidden state that a row wants, float32 [hidden_size], or why there is none; None where it wants none."""


class StepSampler:
    """Reads the wanted logits of one step, in the order of `tokens`.

    With drafts a row has logits before each draft and after the last. The kernel samples at each with the numbers of
    that position, and goes on only while what it sampled is the draft: the very tokens that it would sample one by one,
    so drafts change neither the text of a seed nor any distribution, and a state (penalties, DRY, mirostat) sees
    accepted ids alone.

    `masks` are by row uint32 [words] or [drafts + 1, words], the ids allowed for each token.

    Attributes:
        tokens: int64, indices in the step of the tokens whose logits are wanted: those to sample after, then queries.
        sampled: int32 [rows, 1 + drafts], the tokens that each row sampled; NOT_SAMPLED beyond them.
        made: int64 [rows], how many they are.
    """

    def __init__(
        self, kernel: SamplingKernel, rows: SamplingRows, columns: StepRows, masks: Mapping[int, NDArray[np.uint32]]
    ) -> None:
        self._kernel, self._columns, self._rows = kernel, columns, rows
        self._masks: dict[int, NDArray[np.uint32]] = {}
        self._decodes: DecodeRuns | None = None
        self.tokens: Integers
        for row, mask in masks.items():
            self._masks[row] = np.ascontiguousarray(mask, np.uint32)  # stays for the kernel
        if not columns.only_decodes:
            self._describe()
            return
        self._decodes = rows.begin_decodes(columns.numbers, columns.num_context_tokens)
        self._decodes.place_masks({at: address(mask) for at, mask in self._masks_of(columns.numbers, None)})
        self._step, self.tokens, self.sampled = self._decodes.step, self._decodes.tokens, self._decodes.sampled
        self.made = self._step.made

    def _masks_of(self, numbers: Integers, drafts: Integers | None) -> list[tuple[int, NDArray[np.uint32]]]:
        """Places among some rows, [rows], of those with masks, and those masks, uint32 [1 + drafts, words].

        `drafts` is None if no row has any; ValueError where a mask is for too few tokens or words.
        """
        if not self._masks:
            return []
        words, found = -(-self._kernel.vocab_size // 32), list[tuple[int, NDArray[np.uint32]]]()
        for at, row in enumerate(numbers.tolist()):
            if (mask := self._masks.get(row)) is None:
                continue
            tokens = 1 if drafts is None else 1 + int(drafts[at])
            mask = mask if mask.ndim > 1 else mask[None]
            if mask.shape[0] < tokens or mask.shape[1] < words:
                raise ValueError(f"a mask of shape {mask.shape} for {tokens} tokens and {words} words of ids")
            found.append((at, mask))
        return found

    def _describe(self) -> None:
        columns = self._columns
        sampled_rows = (columns.samples & (columns.num_tokens > 0)).nonzero()[0]
        drafts = columns.num_drafts[sampled_rows].astype(np.int64)
        queries = [(row, at) for row, asked in columns.logprob_queries.items() for at in range(len(asked))]
        owners = np.concatenate((sampled_rows, np.array([row for row, _ in queries], sampled_rows.dtype)))
        numbers = np.array([*[ALL] * len(sampled_rows), *[at for _, at in queries]], np.int64)
        runs = np.zeros((len(owners), len(RUN.names)), np.int64)
        runs[: len(sampled_rows), RUN["count"]], runs[len(sampled_rows) :, RUN["count"]] = 1 + drafts, 1
        made, faults = np.zeros(len(columns), np.int64), np.zeros(len(runs), np.int64)
        self._step = StepRuns(owners, numbers, runs, made, faults)
        self.sampled = np.full((len(columns), 1 + int(drafts.max(initial=0))), NOT_SAMPLED, np.int32)
        self.made = self._step.made
        ends = columns.starts[1:][sampled_rows].astype(np.int64)
        self._describe_sampled(runs[: len(sampled_rows)], sampled_rows, drafts, ends)
        self._describe_queries(runs[len(sampled_rows) :], queries)
        wanted = self._rows.logprobs[columns.numbers[owners]]
        wanted[len(sampled_rows) :] = runs[len(sampled_rows) :, RUN["top_n"]]
        self._step.give_lines(wanted >= 0, np.maximum(wanted, 0))
        counts, starts = runs[:, RUN["count"]], self._step.starts
        places = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
        firsts = np.concatenate((ends - 1 - drafts, np.array([self._token(*query) for query in queries], np.int64)))
        self.tokens = np.repeat(firsts, counts) + places

    def read(self, first: int, logits: NDArray[np.float32]) -> None:
        """Take in the logits of `tokens` from `first` on, float32 [some, vocab], in rows of contiguous memory.

        Raises StepError where the kernel failed.
        """
        end, stride, at = first + len(logits), int(logits.strides[0]), address(logits)
        step, decodes = self._step, self._decodes
        if decodes is not None:
            decodes.place_logits(first, len(logits), at, stride)
            self._kernel.run(decodes.at + first * record.RUN_BYTES, len(logits), stride)
            if end == len(self.tokens):
                self.sampled = decodes.sampled.copy()  # the next step writes its own there
            return
        begin = int(np.searchsorted(step.starts, first, side="right")) - 1
        part = slice(begin, int(np.searchsorted(step.starts, end)))
        from_token = np.maximum(step.starts[part], first)
        runs = step.runs[part].copy()
        runs[:, RUN["logits"]] = at + (from_token - first) * stride
        runs[:, RUN["place"]] = from_token - step.starts[part]
        runs[:, RUN["count"]] = np.minimum(step.starts[1:][part], end) - from_token
        self._kernel.run(address(runs), len(runs), stride)

    def last_sampled(self) -> tuple[Integers, NDArray[np.int32]]:
        """The numbers of the rows that sampled, [rows], and the last one of each."""
        numbers = self._columns.numbers
        if self._all_decoded:
            return numbers, self.sampled[:, 0]
        found = self.made.nonzero()[0]
        return numbers[found], self.sampled[found, self.made[found] - 1]

    def output(self, pool: Callable[[int], Pooled]) -> StepOutput:
        """Once all logits were read; `pool` is called for the index of each row that wants a state and has no error."""
        columns = self._columns
        have_logprobs = (self._rows.logprobs[columns.numbers] >= 0) & self.wants_logprobs
        if self._all_decoded:
            return StepOutput(self.sampled, self.single_logprobs(have_logprobs.nonzero()[0]))
        faulty = self._step.owners[self._step.faults != record.NO_FAULT]
        errors = {index: error for index in {*faulty.tolist()} if (error := self.error(index)) is not None}
        pooled: dict[int, NDArray[np.float32]] = {}
        for index in [each for each in columns.pooling if each not in errors]:
            found = pool(index)
            if isinstance(found, RowError):
                errors[index] = found
            elif found is not None:
                pooled[index] = found
        self.sampled[list(errors)] = NOT_SAMPLED
        have_logprobs[list(errors)] = False
        logprobs: dict[int, Sequence[TokenLogprobs]] = {}
        logprobs |= self.single_logprobs((have_logprobs & (self.made == 1)).nonzero()[0])
        logprobs |= {index: self.logprobs(index) for index in (have_logprobs & (self.made > 1)).nonzero()[0].tolist()}
        queried = {index: self.queried(index) for index in columns.logprob_queries if index not in errors}
        return StepOutput(self.sampled, logprobs, queried, pooled, errors)

    @property
    def wants_logprobs(self) -> bool:
        return self._step.ids.size > 0

    @property
    def _all_decoded(self) -> bool:
        """True if each row decodes and sampled its token, so that none has an error."""
        return self._decodes is not None and int(np.count_nonzero(self.made)) == len(self.made)

    def error(self, index: int) -> RowError | None:
        """The reason why the row of this index gets nothing: of several the one that comes first in the row."""
        step = self._step
        runs = ((step.owners == index) & (step.faults != record.NO_FAULT)).nonzero()[0].tolist()
        if not runs:
            return None
        run = min(runs, key=lambda each: (step.queries[each] == ALL, step.queries[each]))
        fault = int(step.faults[run])
        reason: RealizarError
        if fault == record.NOTHING_ALLOWED:
            reason = nothing_allowed(int(self._columns.numbers[index]) in self._masks)
        else:
            reason = unusable_logit() if fault == record.UNUSABLE else unusable_logits()
        return RowError.of(reason, "sampling")

    def logprobs(self, index: int) -> LogprobColumns:
        """Log-probabilities of a row's sampled tokens, where its parameters ask for them."""
        row = int(self._columns.numbers[index])
        if self._rows.logprobs[row] < 0 or not self.made[index]:
            return LogprobColumns()
        (run,) = ((self._step.owners == index) & (self._step.queries == ALL)).nonzero()[0]
        return self._lines(np.array([run]), int(self.made[index]))

    def single_logprobs(self, indices: Integers) -> dict[int, StepEntry]:
        """Log-probabilities of rows that have sampled one token and ask for them, in columns by the length of lists."""
        step, entries = self._step, dict[int, StepEntry]()
        runs = indices
        if self._decodes is None:  # of decodes each row's run has its index
            of_row = np.zeros(len(self._columns), np.intp)
            of_row[step.owners[step.queries == ALL]] = (step.queries == ALL).nonzero()[0]
            runs = of_row[indices]
        top_n = step.runs[runs, RUN["top_n"]]
        for count in set(top_n.tolist()):
            places = (top_n == count).nonzero()[0]
            columns = self._lines(runs[places], 1)
            for place, index in enumerate(indices[places].tolist()):
                entries[index] = StepEntry(columns, place)
        return entries

    def queried(self, index: int) -> LogprobColumns:
        runs = ((self._step.owners == index) & (self._step.queries != ALL)).nonzero()[0]
        return LogprobColumns.joined([self._lines(runs[at : at + 1], 1) for at in range(len(runs))])

    def _describe_sampled(
        self, runs: NDArray[np.int64], sampled_rows: Integers, drafts: Integers, ends: Integers
    ) -> None:
        columns, numbers = self._columns, self._columns.numbers[sampled_rows]
        token_ids = np.ascontiguousarray(columns.token_ids, np.int32)
        self._token_ids = token_ids  # stays for the kernel
        values = {
            "row": self._rows.addresses(numbers),
            "count": 1 + drafts,
            "position": columns.num_context_tokens[sampled_rows] - drafts,
            "drafts": address(token_ids) + 4 * (ends - drafts),
            "sampled": address(self.sampled) + sampled_rows * self.sampled.strides[0],
            "made": address(self.made) + sampled_rows * 8,
        }
        for name, column in values.items():
            runs[:, RUN[name]] = column
        for at, mask in self._masks_of(numbers, drafts):
            runs[at, RUN["mask"]], runs[at, RUN["mask_stride"]] = address(mask), mask.strides[0]

    def _describe_queries(self, runs: NDArray[np.int64], queries: list[tuple[int, int]]) -> None:
        most = self._kernel.vocab_size
        for run, (row, at) in zip(runs, queries, strict=True):
            query = self._columns.logprob_queries[row][at]
            run[RUN["top_n"]] = min(query.top_n, most)
            run[RUN["target"]] = -1 if query.target is None else min(max(query.target, 0), most - 1)

    def _token(self, row: int, at: int) -> int:
        return int(self._columns.starts[row]) + self._columns.logprob_queries[row][at].index

    def _lines(self, runs: NDArray[np.intp], count: int) -> LogprobColumns:
        """The log-probabilities of the first `count` tokens of runs that list equally many ids."""
        step, top_n = self._step, int(self._step.runs[runs[0], RUN["top_n"]])
        ids = step.ids[step.ids_at[runs][:, None] + np.arange(count * (2 + top_n))].reshape(-1, 2 + top_n)
        values = step.values[step.values_at[runs][:, None] + np.arange(count * (1 + top_n))]
        listed = np.empty((len(ids), 1 + top_n), np.int32)
        listed[:, 0], listed[:, 1:] = ids[:, 0], ids[:, 2:]
        return LogprobColumns(1 + top_n, listed.tobytes(), values.tobytes(), ids[:, 1].tobytes())
