"""`CUDAStep`: a step on its way; its rows are sampled when its result, or the next step, is asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.base import ForwardInput
from realizar.backends.cuda.device_errors import step_errors
from realizar.backends.draft_model import DraftModel
from realizar.batch import StepOutput
from realizar.errors import CapacityError


@dataclass(frozen=True, eq=False)
class WantedTokens:
    """The tokens of a step whose logits are wanted: those to sample after, in the order of their rows, then queries.

    It may be that of other steps too: nothing changes it.

    Attributes:
        tokens: index in the step of each.
        rows: index in the step of each one's row.
        places: of a token to sample, how many of the row's drafts stand before; of a query, its number among the row's.
        num_sampled: how many of `tokens` are to be sampled after.
        sampled_rows: index in the step of each row that samples.
        num_drafts: most drafts of a row.
    """

    tokens: list[int]
    rows: list[int]
    places: list[int]
    num_sampled: int
    sampled_rows: list[int]
    num_drafts: int

    @cached_property
    def sampled(self) -> NDArray[np.intp]:
        """intp [3, num_sampled], the first of `tokens`, `rows` and `places`."""
        count = self.num_sampled
        return np.array([self.tokens[:count], self.rows[:count], self.places[:count]], np.intp)


def wanted_tokens(step: ForwardInput) -> WantedTokens:
    columns = step.columns
    if columns.only_decodes:
        return _wanted_of_decodes(len(columns))
    wanted = _wanted_of(*(each.tobytes() for each in (columns.starts, columns.samples, columns.num_drafts)))
    if not columns.logprob_queries:
        return wanted
    tokens, rows, places, starts = [*wanted.tokens], [*wanted.rows], [*wanted.places], columns.starts.tolist()
    for index, queries in columns.logprob_queries.items():
        for number, query in enumerate(queries):
            tokens.append(starts[index] + query.index)
            rows.append(index)
            places.append(number)
    return replace(wanted, tokens=tokens, rows=rows, places=places)


@lru_cache(maxsize=64)
def _wanted_of(of_starts: bytes, of_samples: bytes, of_drafts: bytes) -> WantedTokens:
    """Of steps whose rows have so many tokens and drafts, and sample or not; without queries."""
    firsts, samples = np.frombuffer(of_starts, np.int32), np.frombuffer(of_samples, np.bool_)
    starts, drafts = firsts.tolist(), np.frombuffer(of_drafts, np.int32).tolist()
    sampled_rows = (samples & (firsts[1:] > firsts[:-1])).nonzero()[0].tolist()
    sampled = [(index, place) for index in sampled_rows for place in range(drafts[index] + 1)]
    rows, places = [index for index, _ in sampled], [place for _, place in sampled]
    tokens = [starts[index + 1] - 1 - drafts[index] + place for index, place in sampled]
    return WantedTokens(
        tokens, rows, places, len(tokens), sampled_rows, max([drafts[index] for index in sampled_rows], default=0)
    )


@lru_cache(maxsize=1024)
def _wanted_of_decodes(count: int) -> WantedTokens:
    """Of as many rows that decode."""
    return WantedTokens(list(range(count)), list(range(count)), [0] * count, count, list(range(count)), 0)


class Finished(Protocol):
    """A step whose sampled tokens, log-probabilities and pooled vectors are on their way to the host.

    `made` are its sampled tokens on the device, int32 [rows that sample, 1 + drafts], below 0 after those that stand.
    """

    @property
    def made(self) -> torch.Tensor: ...

    def read(self, step: CUDAStep) -> StepOutput:
        """Wait for them; what the step's rows get."""


class CUDAStep:
    """A submitted step; `finish` samples and starts the copies, once; then what `drafter` proposes is started."""

    def __init__(
        self,
        forward_input: ForwardInput,
        wanted: WantedTokens,
        finish: Callable[[CUDAStep], Finished],
        device: torch.device,
        drafter: DraftModel | None = None,
    ) -> None:
        self.forward_input, self.wanted = forward_input, wanted
        self.masks: Mapping[int, NDArray[np.uint32]] = {}
        self.deferred: frozenset[int] = frozenset()
        self._are_deferred = np.zeros(0, np.bool_)  # by the numbers of rows
        self._finish, self._device, self._drafter = finish, device, drafter
        self._finished: Finished | None = None
        self._output: StepOutput | None = None
        self._failed = False

    def set_masks(self, masks: Mapping[int, NDArray[np.uint32]]) -> None:
        self.masks = {**self.masks, **masks} if self.masks else masks

    def defer(self, rows: Collection[int]) -> None:
        self.deferred = frozenset(rows)
        self._are_deferred = np.zeros(int(self.forward_input.columns.numbers.max(initial=-1)) + 1, np.bool_)
        self._are_deferred[list(self.deferred)] = True

    def are_deferred(self, numbers: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """bool [rows], true for each of these rows of the step that samples nothing, as its masks are late."""
        return self._are_deferred[numbers] if self.deferred else np.zeros(len(numbers), np.bool_)

    def sample(self) -> None:
        with step_errors(self._device):
            self.start_sampling()

    def start_sampling(self) -> None:
        """Start sampling the step's rows, once, even if that fails. Another step may start only after this."""
        if self._finished is None and not self._failed:
            self._failed = True
            self._finished = self._finish(self)
            self._failed = False
            if self._drafter is not None:
                columns = self.forward_input.columns
                samples = columns.samples & (columns.num_tokens > 0) & ~self.are_deferred(columns.numbers)
                most = np.where(samples, columns.num_drafts + np.intp(1), 0)
                self._drafter.propose(self.forward_input, most, None, self._finished.made)

    def result(self) -> StepOutput:
        if self._output is None:
            with step_errors(self._device):
                self.start_sampling()
                if self._finished is None:
                    raise CapacityError("the step's rows could not be sampled")
                output = self._finished.read(self)
                self._output = output if self._drafter is None else self._drafter.proposed(self.forward_input, output)
        return self._output
