"""`CUDAStep`: a step on its way; its rows are sampled when its result, or the next step, is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.base import ForwardInput
from realizar.backends.cuda.device_errors import device_errors
from realizar.backends.cuda.sampling.logprobs import PendingLogprobs
from realizar.backends.cuda.sampling.sampler import NONE_ALLOWED
from realizar.backends.row_faults import finite_vector, nothing_allowed
from realizar.batch import RowOutput, StepOutput
from realizar.errors import CapacityError, RealizarError
from realizar.outputs import RowError, TokenLogprobs

NOT_REACHED = -2  # in place of a choice after a draft that was not chosen


@dataclass(slots=True)  # one a row and step: frozen it would take four times as long to make
class Wanted:
    """A token whose logits are wanted.

    Attributes:
        token: index in the step. row_index: of its row in the step. query: of the row's queries, or -1 for a choice.
        place: of the choice among the row's, which drafts make more than one.
    """

    token: int
    row_index: int
    query: int
    place: int = 0


def wanted_tokens(step: ForwardInput) -> list[Wanted]:
    """Choices first, in the order of their rows, then queries."""
    starts = step.query_starts
    choices = [
        Wanted(starts[index + 1] - 1 - row.num_drafts + place, index, -1, place)
        for index, row in enumerate(step.rows)
        if row.sample and row.token_ids
        for place in range(row.num_drafts + 1)
    ]
    queries = [
        Wanted(starts[index] + query.index, index, place)
        for index, row in enumerate(step.rows)
        for place, query in enumerate(row.logprob_queries)
    ]
    return choices + queries


@dataclass(slots=True)
class PendingResult:
    """What is being copied to the host.

    Attributes:
        choices: int32 of the choices, in the order of `wanted_tokens`; NOT_REACHED for those that were not made.
        logprobs: of some wanted tokens, by their index.
        pooled: float32 [hidden_size] of rows, by their index in the step.
        errors: of rows that failed on the host, by their index in the step.
        done: recorded after the last copy; None where copies wait.
    """

    choices: torch.Tensor
    logprobs: list[tuple[Sequence[int], PendingLogprobs]]
    pooled: dict[int, torch.Tensor]
    errors: dict[int, RowError]
    done: torch.cuda.Event | None


class CUDAStep:
    """A submitted step.

    Args:
        finish: samples and starts the copies; called once.
        device: where the step runs.
    """

    def __init__(
        self,
        forward_input: ForwardInput,
        wanted: Sequence[Wanted],
        finish: Callable[[CUDAStep], PendingResult],
        device: torch.device,
    ) -> None:
        self.forward_input, self.wanted = forward_input, wanted
        self.masks: dict[int, NDArray[np.uint32]] = {}
        self._finish, self._device = finish, device
        self._pending: PendingResult | None = None
        self._output: StepOutput | None = None
        self._failed = False

    def set_masks(self, masks: Mapping[int, NDArray[np.uint32]]) -> None:
        self.masks.update(masks)

    def sample(self) -> None:
        """Let the rows be sampled, once, even if that fails; needed before another step may start."""
        if self._pending is None and not self._failed:
            self._failed = True
            self._pending = self._finish(self)
            self._failed = False

    def result(self) -> StepOutput:
        if self._output is None:
            with device_errors(self._device):
                self.sample()
                if self._pending is None:
                    raise CapacityError("the step's rows could not be sampled")
                if self._pending.done is not None:
                    self._pending.done.synchronize()
                self._output = self._read(self._pending)
        return self._output

    def _read(self, pending: PendingResult) -> StepOutput:
        """The rows' outputs; what can't be used of one row's numbers is that row's error."""
        found: dict[int, TokenLogprobs] = {}
        for places, logprobs in pending.logprobs:
            found.update(zip(places, logprobs.read(), strict=True))
        choices = pending.choices.tolist()
        wanted: dict[int, list[int]] = {}
        for index, want in enumerate(self.wanted):
            wanted.setdefault(want.row_index, []).append(index)
        outputs: list[RowOutput] = []
        for index, row in enumerate(self.forward_input.rows):
            error, vector = pending.errors.get(index), pending.pooled.get(index)
            if error is None:
                try:
                    outputs.append(self._row_output(row.row, wanted.get(index, ()), choices, found, vector))
                    continue
                except RealizarError as raised:
                    error = RowError.of(raised, "sampling")
            outputs.append(RowOutput(row.row, (), error=error))
        return StepOutput(tuple(outputs))

    def _row_output(
        self, row: int, wanted: Sequence[int], choices: Sequence[int], found: Mapping[int, TokenLogprobs],
        vector: torch.Tensor | None,
    ) -> RowOutput:  # fmt: skip
        """What one row got; `wanted` are the indices of its wanted tokens.

        Raises:
            RealizarError: nothing could be chosen, or a number is not finite.
        """
        token_ids: list[int] = []
        chosen: list[TokenLogprobs] = []
        queried: list[TokenLogprobs] = []
        for index in wanted:
            is_choice = self.wanted[index].query < 0
            if is_choice and choices[index] == NOT_REACHED:
                continue
            if is_choice and choices[index] < 0:
                if choices[index] == NONE_ALLOWED:
                    raise nothing_allowed(row in self.masks)
                raise RealizarError("no token can be sampled: the model gave a logit that is not finite")
            if index in found and math.isnan(found[index].logprob):
                raise RealizarError("the model's logits are not usable: their maximum is not finite")
            if is_choice:
                token_ids.append(choices[index])
            if index in found:
                (chosen if is_choice else queried).append(found[index])
        pooled = None if vector is None else finite_vector(vector.numpy())
        return RowOutput(row, tuple(token_ids), tuple(chosen), tuple(queried), pooled)
