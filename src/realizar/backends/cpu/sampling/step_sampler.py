"""`StepSampler`: what the rows of a step want of their logits, for the kernel, and the records of what it found."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.kernels.sampling import record
from realizar.backends.cpu.kernels.sampling.record import RUN, RUN_LOGITS, RUN_PLACE
from realizar.backends.cpu.records import address
from realizar.backends.cpu.sampling.kernel import SamplingKernel
from realizar.backends.cpu.sampling.rows import SamplingRows
from realizar.backends.row_faults import nothing_allowed
from realizar.batch import NO_CHOICE, StepRows
from realizar.errors import RealizarError
from realizar.outputs import RowError, TokenLogprobs

Integers = NDArray[np.integer]
_ALL = -1  # in place of a query's number: the run has a row's choices


class StepSampler:
    """Reads the wanted logits of one step, in the order of `tokens`.

    With drafts a row has logits before each draft and after the last. The kernel chooses at each with the numbers of
    that position, and goes on only while what it chose is the draft: the very choices that it would make step by step,
    so drafts change neither the text of a seed nor any distribution, and a state (penalties, DRY, mirostat) sees
    accepted ids alone.

    Args:
        columns: the step's rows.
        masks: by row uint32 [words] or [drafts + 1, words], the ids allowed for each choice.

    Attributes:
        tokens: indices in the step of the tokens whose logits are wanted: those of choices, then those of queries.
        choices: int32 [rows, 1 + drafts], the choices that each row made; NO_CHOICE beyond them.
        made: int64 [rows], how many they are.
    """

    def __init__(
        self, kernel: SamplingKernel, rows: SamplingRows, columns: StepRows, masks: Mapping[int, NDArray[np.uint32]]
    ) -> None:
        self._kernel, self._columns, self._rows = kernel, columns, rows
        self._masks = {row: np.ascontiguousarray(mask, np.uint32) for row, mask in masks.items()}  # stay for the kernel
        choosing = (columns.samples & (columns.num_tokens > 0)).nonzero()[0]
        drafts = columns.num_drafts[choosing].astype(np.int64)
        queries = [(row, at) for row, asked in columns.logprob_queries.items() for at in range(len(asked))]
        self.choices = np.full((len(columns), 1 + int(drafts.max(initial=0))), NO_CHOICE, np.int32)
        self.made = np.zeros(len(columns), np.int64)
        self._owners = np.concatenate((choosing, np.array([row for row, _ in queries], choosing.dtype)))
        self._queries = np.array([*[_ALL] * len(choosing), *[at for _, at in queries]], np.int64)
        self._runs = np.zeros((len(self._owners), len(RUN.names)), np.int64)
        self._faults = np.zeros((len(self._owners), 2), np.int64)
        ends = columns.starts[1:][choosing].astype(np.int64)
        self._describe_choices(self._runs[: len(choosing)], choosing, drafts, ends)
        self._describe_queries(self._runs[len(choosing) :], queries)
        self._describe_results()
        counts = self._runs[:, record.RUN_COUNT]
        self._starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
        places = np.arange(self._starts[-1]) - np.repeat(self._starts[:-1], counts)
        firsts = np.concatenate((ends - 1 - drafts, np.array([self._token(*query) for query in queries], np.int64)))
        self.tokens: list[int] = (np.repeat(firsts, counts) + places).tolist()

    def read(self, first: int, logits: NDArray[np.float32]) -> None:
        """Take in the logits of `tokens` from `first` on, float32 [some, vocab], in rows of contiguous memory.

        Raises:
            StepError: the kernel failed.
        """
        end, stride = first + len(logits), int(logits.strides[0])
        begin = int(np.searchsorted(self._starts, first, side="right")) - 1
        part = slice(begin, int(np.searchsorted(self._starts, end)))
        from_token = np.maximum(self._starts[part], first)
        runs = self._runs[part].copy()
        runs[:, RUN_LOGITS] = address(logits) + (from_token - first) * stride
        runs[:, RUN_PLACE] = from_token - self._starts[part]
        runs[:, record.RUN_COUNT] = np.minimum(self._starts[1:][part], end) - from_token
        self._kernel.run(runs, stride)

    def error(self, index: int) -> RowError | None:
        """The reason why the row of this index gets nothing: of several the one that comes first in the row."""
        runs = ((self._owners == index) & (self._faults[:, 0] != record.NO_FAULT)).nonzero()[0].tolist()
        if not runs:
            return None
        run = min(runs, key=lambda each: (self._queries[each] == _ALL, self._queries[each]))
        fault, logit = int(self._faults[run, 0]), float(self._faults.view(np.float64)[run, 1])
        reason: RealizarError
        if fault == record.NOTHING_ALLOWED:
            reason = nothing_allowed(int(self._columns.numbers[index]) in self._masks)
        elif fault == record.UNUSABLE:
            reason = RealizarError(f"no token can be sampled: the model gave a logit of {logit}")
        else:
            reason = RealizarError(f"the model's logits are not usable: their maximum is {logit}")
        return RowError.of(reason, "sampling")

    @property
    def faulty(self) -> NDArray[np.intp]:
        """Indices of the rows that have an error, maybe several times."""
        faulty: NDArray[np.intp] = self._owners[self._faults[:, 0] != record.NO_FAULT]
        return faulty

    def logprobs(self, index: int) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of a row's choices, where its parameters ask for them."""
        row = int(self._columns.numbers[index])
        if self._rows.logprobs[row] < 0 or not self.made[index]:
            return ()
        run = int(((self._owners == index) & (self._queries == _ALL)).nonzero()[0][0])
        return self._lines(run, int(self.made[index]))

    def queried(self, index: int) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities that a row's queries ask for."""
        runs = ((self._owners == index) & (self._queries != _ALL)).nonzero()[0].tolist()
        return tuple([self._lines(run, 1)[0] for run in runs])

    def _describe_choices(self, runs: NDArray[np.int64], choosing: Integers, drafts: Integers, ends: Integers) -> None:
        columns, table = self._columns, self._rows.table
        numbers = columns.numbers[choosing]
        token_ids = np.ascontiguousarray(columns.token_ids, np.int32)
        self._token_ids = token_ids  # stays for the kernel
        values = {
            "row": address(table) + numbers * table.strides[0],
            "count": 1 + drafts,
            "position": columns.num_context_tokens[choosing] - drafts,
            "drafts": address(token_ids) + 4 * (ends - drafts),
            "choices": address(self.choices) + choosing * self.choices.strides[0],
            "made": address(self.made) + choosing * 8,
            "top_n": np.maximum(self._rows.logprobs[numbers], 0),
        }
        for name, column in values.items():
            runs[:, RUN[name]] = column
        words = -(-self._kernel.vocab_size // 32)
        for at in [at for at, row in enumerate(numbers.tolist()) if row in self._masks] if self._masks else ():
            mask = np.atleast_2d(self._masks[int(numbers[at])])
            if mask.shape[0] < 1 + drafts[at] or mask.shape[1] < words:
                raise ValueError(f"a mask of shape {mask.shape} for {1 + drafts[at]} choices and {words} words of ids")
            runs[at, RUN["mask"]], runs[at, RUN["mask_stride"]] = address(mask), mask.strides[0]

    def _describe_queries(self, runs: NDArray[np.int64], queries: list[tuple[int, int]]) -> None:
        most = self._kernel.vocab_size
        for run, (row, at) in zip(runs, queries, strict=True):
            query = self._columns.logprob_queries[row][at]
            run[RUN["count"]], run[RUN["top_n"]] = 1, min(query.top_n, most)
            run[RUN["target"]] = -1 if query.target is None else min(max(query.target, 0), most - 1)

    def _describe_results(self) -> None:
        """Give each run room for its faults and log-probabilities."""
        runs, top_n = self._runs, self._runs[:, record.RUN_TOP_N]
        runs[:, RUN["fault"]] = address(self._faults) + 16 * np.arange(len(runs))
        lines = np.where(self._wants_lines(), runs[:, record.RUN_COUNT], 0)
        self._ids_at = np.concatenate((np.zeros(1, np.int64), np.cumsum(lines * (2 + top_n))))
        self._values_at = np.concatenate((np.zeros(1, np.int64), np.cumsum(lines * (1 + top_n))))
        self._ids = np.empty(int(self._ids_at[-1]), np.int32)
        self._values = np.empty(int(self._values_at[-1]), np.float64)
        runs[:, RUN["ids"]] = address(self._ids) + 4 * self._ids_at[:-1]
        runs[:, RUN["values"]] = address(self._values) + 8 * self._values_at[:-1]

    def _wants_lines(self) -> NDArray[np.bool_]:
        """bool [runs], true for those that want log-probabilities."""
        wanted: NDArray[np.bool_] = (self._queries != _ALL) | (
            self._rows.logprobs[self._columns.numbers[self._owners]] >= 0
        )
        return wanted

    def _token(self, row: int, at: int) -> int:
        return int(self._columns.starts[row]) + self._columns.logprob_queries[row][at].index

    def _lines(self, run: int, count: int) -> tuple[TokenLogprobs, ...]:
        top_n = int(self._runs[run, record.RUN_TOP_N])
        first, start = int(self._ids_at[run]), int(self._values_at[run])
        ids = self._ids[first : first + count * (2 + top_n)].reshape(count, -1).tolist()
        values = self._values[start : start + count * (1 + top_n)].reshape(count, -1).tolist()
        return tuple(
            [
                TokenLogprobs(chosen, logprobs[0], rank, tuple(zip(top, logprobs[1:], strict=True)))
                for (chosen, rank, *top), logprobs in zip(ids, values, strict=True)
            ]
        )
