"""`PendingResult`: the results of a step that kernels sampled, on their way to the host, and their reading. torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.cuda.sampling.step_sampler import RowLogprobs
from realizar.backends.cuda.step import CUDAStep, WantedTokens
from realizar.backends.row_faults import finite_vector, nothing_allowed, unusable_logit, unusable_logits
from realizar.batch import NOT_SAMPLED, RowOutput, StepOutput
from realizar.errors import RealizarError
from realizar.logprob_columns import StepEntry
from realizar.outputs import RowError, TokenLogprobs

NOT_REACHED = -2  # in place of a token after a draft that was not sampled
NONE_ALLOWED = -3  # in place of the token of a row all of whose ids are forbidden; any other below 0: unusable logits

TakeIn: TypeAlias = Callable[[NDArray[np.intp], NDArray[np.int32]], tuple[NDArray[np.intp], NDArray[np.bool_]]]
"""Takes in the sampled tokens of rows with drafts: called with the numbers of rows, intp [rows], and the tokens, int32
[rows, 1 + drafts], some below 0 from where none stands on; returns how many each keeps up to its output's end, intp
[rows], and whether that is reached, bool [rows]. A grammar may end an output before `min_tokens`."""


def _nothing() -> None:
    """For results that are there, in memory of their own."""


@dataclass(slots=True)
class PendingResult:
    """A `Finished` step.

    Attributes:
        sampled: int32 [rows that sample, 1 + drafts], NOT_REACHED where none stands.
        logprobs: of some wanted tokens, by their index.
        pooled: float32 [hidden_size] of rows, or why a row gets nothing, by their index in the step.
        take_in: called once where rows have drafts.
        wait: waits for the copies.
        release: called once the results were read; their memory is then used for another step's.
    """

    sampled: torch.Tensor
    logprobs: list[RowLogprobs]
    pooled: Mapping[int, torch.Tensor | RowError]
    take_in: TakeIn
    wait: Callable[[], None] = _nothing
    release: Callable[[], None] = _nothing

    def read(self, step: CUDAStep) -> StepOutput:
        """The step's columns, and by themselves the rows that have more than sampled tokens, or that failed."""
        self.wait()
        columns = step.forward_input.columns
        sampled, faults = self._standing(step)
        others: dict[int, RowOutput] = {}
        plain, found = self._take_logprobs(step, sampled)
        logprobs_of = _by_rows(step.wanted, found) if found else {}
        for index in sorted({*self.pooled, *logprobs_of, *faults}):
            others[index] = self._row_alone(step, index, sampled, faults, logprobs_of.get(index, ((), ())))
            if others[index].error is not None:
                sampled[index] = NOT_SAMPLED
        self.release()
        return StepOutput(columns.numbers, sampled, others, plain)

    def _standing(self, step: CUDAStep) -> tuple[NDArray[np.int32], dict[int, int]]:
        columns, made = step.forward_input.columns, self.sampled.numpy()
        if columns.only_decodes:
            sampled = made.copy()
        else:
            sampled = np.full((len(columns), made.shape[1]), NOT_SAMPLED, np.int32)
            sampled[step.wanted.sampled_rows] = made
        if not step.wanted.num_drafts and made.min(initial=0) >= 0:
            if step.held:
                sampled[step.are_held(columns.numbers)] = NOT_SAMPLED
            return sampled, {}
        samples = columns.samples & (columns.num_tokens > 0) & ~step.are_held(columns.numbers)
        counts, ended = ((sampled[:, 0] >= 0) & samples).astype(np.intp), np.zeros(len(columns), np.bool_)
        drafted = samples & (columns.num_drafts > 0)
        if drafted.any():
            counts[drafted], ended[drafted] = self.take_in(columns.numbers[drafted], sampled[drafted])
        width = sampled.shape[1]
        after = sampled[np.arange(len(columns)), np.minimum(counts, width - 1)]
        failed = samples & ~ended & (counts < width) & (after < 0) & (after != NOT_REACHED)
        counts[failed] = 0
        sampled[np.arange(width) >= counts[:, None]] = NOT_SAMPLED
        return sampled, {index: int(after[index]) for index in failed.nonzero()[0].tolist()}

    def _take_logprobs(
        self, step: CUDAStep, sampled: NDArray[np.int32]
    ) -> tuple[dict[int, StepEntry], dict[int, StepEntry]]:
        """Log-probabilities of rows with one sampled token and nothing else, by row; all others, by wanted token."""
        plain: dict[int, StepEntry] = {}
        found: dict[int, StepEntry] = {}
        if not self.logprobs:
            return plain, found
        columns, wanted = step.forward_input.columns, step.wanted
        alone = sampled[:, 0] >= 0
        if wanted.num_drafts:
            alone[:] = False
        alone[[*self.pooled, *columns.logprob_queries]] = False
        rows = np.arange(len(columns)) if columns.only_decodes else np.array(wanted.rows, np.intp)
        for indices, logprobs in self.logprobs:
            of_rows = rows[indices]
            for places, entries, are_usable in logprobs.groups():
                owners = of_rows[places]
                are_plain = alone[owners] & are_usable
                every = zip(owners.tolist(), are_plain.tolist(), entries.apart(), strict=True)
                for place, (row, is_plain, entry) in enumerate(every):
                    if is_plain:
                        plain[row] = entry
                    else:
                        found[int(indices[places[place]])] = entry
        return plain, found

    def _row_alone(
        self, step: CUDAStep, index: int, sampled: NDArray[np.int32], faults: Mapping[int, int],
        logprobs: tuple[Sequence[TokenLogprobs], Sequence[TokenLogprobs]],
    ) -> RowOutput:  # fmt: skip
        """One row's output. A row whose numbers can't be used gets an error, and the others are unharmed."""
        number, pooled = int(step.forward_input.columns.numbers[index]), self.pooled.get(index)
        if isinstance(pooled, RowError):
            return RowOutput(number, (), error=pooled)
        try:
            if index in faults:
                raise nothing_allowed(number in step.masks) if faults[index] == NONE_ALLOWED else unusable_logit()
            token_ids = tuple([token_id for token_id in sampled[index].tolist() if token_id != NOT_SAMPLED])
            return _row_output(number, token_ids, *logprobs, pooled)
        except RealizarError as raised:
            return RowOutput(number, (), error=RowError.of(raised, "sampling"))


def _by_rows(
    wanted: WantedTokens, found: Mapping[int, StepEntry]
) -> dict[int, tuple[list[TokenLogprobs], list[TokenLogprobs]]]:
    by_rows: dict[int, tuple[list[TokenLogprobs], list[TokenLogprobs]]] = {}
    for index in sorted(found):
        pair = by_rows.setdefault(wanted.rows[index], ([], []))
        pair[index >= wanted.num_sampled].append(found[index][0])
    return by_rows


def _row_output(
    number: int, token_ids: tuple[int, ...], logprobs: Sequence[TokenLogprobs], queried: Sequence[TokenLogprobs],
    vector: torch.Tensor | None,
) -> RowOutput:  # fmt: skip
    """Without log-probabilities of sampled tokens that do not stand; RealizarError where a number is not finite."""
    logprobs = logprobs[: len(token_ids)]
    if (logprobs or queried) and any(math.isnan(each.logprob) for each in (*logprobs, *queried)):
        raise unusable_logits()
    pooled = None if vector is None else finite_vector(vector.numpy())
    return RowOutput(number, token_ids, tuple(logprobs), tuple(queried), pooled)
