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
from realizar.backends.cuda.step import CUDAStep
from realizar.backends.row_faults import finite_vector, nothing_allowed, unusable_logit, unusable_logits
from realizar.batch import NOT_SAMPLED, StepOutput
from realizar.errors import RealizarError
from realizar.logprob_columns import RowColumns, StepEntry
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
        made: as of `Finished`. sampled: the same in the host's memory, NOT_REACHED where none stands.
        logprobs: of some wanted tokens, by their index.
        pooled: float32 [hidden_size] of rows, or why a row gets nothing, by their index in the step.
        take_in: called once where rows have drafts.
        wait: waits for the copies.
        release: called once the results were read; their memory is then used for another step's.
    """

    made: torch.Tensor
    sampled: torch.Tensor
    logprobs: list[RowLogprobs]
    pooled: Mapping[int, torch.Tensor | RowError]
    take_in: TakeIn
    wait: Callable[[], None] = _nothing
    release: Callable[[], None] = _nothing

    def read(self, step: CUDAStep) -> StepOutput:
        """The step's columns. A row whose numbers can't be used gets an error, and the others are unharmed."""
        self.wait()
        columns = step.forward_input.columns
        sampled, faults = self._standing(step)
        errors = {index: each for index, each in self.pooled.items() if isinstance(each, RowError)}
        pooled: dict[int, NDArray[np.float32]] = {}
        queried: dict[int, Sequence[TokenLogprobs]] = {}
        logprobs, found = self._take_logprobs(step, sampled)
        for index in sorted({*self.pooled, *found, *faults} - errors.keys()):
            try:
                if index in faults:
                    masked = int(columns.numbers[index]) in step.masks
                    raise nothing_allowed(masked) if faults[index] == NONE_ALLOWED else unusable_logit()
                made, asked = found.get(index, ([], []))
                made = made[: int(np.count_nonzero(sampled[index] != NOT_SAMPLED))]
                if any(math.isnan(each.logprob) for each in (*made, *asked)):
                    raise unusable_logits()
                if isinstance(vector := self.pooled.get(index), torch.Tensor):
                    pooled[index] = finite_vector(vector.numpy())
            except RealizarError as raised:
                errors[index] = RowError.of(raised, "sampling")
            else:
                logprobs = {**logprobs, index: made} if made else logprobs
                queried |= {index: asked} if asked else {}
        sampled[list(errors)] = NOT_SAMPLED
        self.release()
        return StepOutput(sampled, logprobs, queried, pooled, errors)

    def _standing(self, step: CUDAStep) -> tuple[NDArray[np.int32], dict[int, int]]:
        columns, made = step.forward_input.columns, self.sampled.numpy()
        if columns.only_decodes:
            sampled = made.copy()
        else:
            sampled = np.full((len(columns), made.shape[1]), NOT_SAMPLED, np.int32)
            sampled[step.wanted.sampled_rows] = made
        if not step.wanted.num_drafts and made.min(initial=0) >= 0:
            if step.deferred:
                sampled[step.are_deferred(columns.numbers)] = NOT_SAMPLED
            return sampled, {}
        samples = columns.samples & (columns.num_tokens > 0) & ~step.are_deferred(columns.numbers)
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
    ) -> tuple[Mapping[int, Sequence[TokenLogprobs]], dict[int, tuple[list[TokenLogprobs], list[TokenLogprobs]]]]:
        """Log-probabilities by row: of those with one sampled token and nothing else, and of the others' sampled tokens
        and queries.
        """
        plain: dict[int, Sequence[TokenLogprobs]] = {}
        found: dict[int, StepEntry] = {}
        if not self.logprobs:
            return plain, {}
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
                if len(self.logprobs) == 1 and len(places) == len(indices) and are_plain.all():
                    return RowColumns(owners.tolist(), entries), {}  # nearly every step that has any
                every = zip(owners.tolist(), are_plain.tolist(), entries.apart(), strict=True)
                for place, (row, is_plain, entry) in enumerate(every):
                    if is_plain:
                        plain[row] = entry
                    else:
                        found[int(indices[places[place]])] = entry
        by_rows: dict[int, tuple[list[TokenLogprobs], list[TokenLogprobs]]] = {}
        for index in sorted(found):
            pair = by_rows.setdefault(wanted.rows[index], ([], []))
            pair[index >= wanted.num_sampled].append(found[index][0])
        return plain, by_rows
