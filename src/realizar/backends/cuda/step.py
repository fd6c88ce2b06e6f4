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
from realizar.backends.cuda.sampling.verify import NOT_REACHED
from realizar.backends.row_faults import finite_vector, nothing_allowed
from realizar.batch import NO_CHOICE, RowOutput, ScheduledRow, StepOutput
from realizar.errors import CapacityError, RealizarError
from realizar.outputs import RowError, TokenLogprobs


@dataclass(frozen=True, slots=True)
class WantedTokens:
    """The tokens of a step whose logits are wanted: those before choices, in the order of their rows, then queries.

    Attributes:
        tokens: index in the step of each.
        rows: index in the step of each one's row.
        places: before a choice, how many of the row's drafts stand before it; of a query, its number among the row's.
        num_choices: how many of `tokens` stand before choices.
        choosing: index in the step of each row that chooses.
        num_drafts: most drafts of a row.
    """

    tokens: list[int]
    rows: list[int]
    places: list[int]
    num_choices: int
    choosing: list[int]
    num_drafts: int


def wanted_tokens(step: ForwardInput) -> WantedTokens:
    """The tokens whose logits a step's rows want."""
    columns = step.columns
    if columns.only_decodes:
        count = len(columns)
        return WantedTokens(list(range(count)), list(range(count)), [0] * count, count, list(range(count)), 0)
    starts = step.query_starts
    choosing = (columns.samples & (columns.num_tokens > 0)).nonzero()[0].tolist()
    drafts = columns.num_drafts.tolist()
    num_drafts = max([drafts[index] for index in choosing], default=0)
    if num_drafts:
        choices = [(index, place) for index in choosing for place in range(drafts[index] + 1)]
        rows, places = [index for index, _ in choices], [place for _, place in choices]
        tokens = [starts[index + 1] - 1 - drafts[index] + place for index, place in choices]
    else:
        rows, places = list(choosing), [0] * len(choosing)
        tokens = [starts[index + 1] - 1 for index in choosing]
    num_choices = len(tokens)
    for index, queries in columns.logprob_queries.items():
        for number, query in enumerate(queries):
            tokens.append(starts[index] + query.index)
            rows.append(index)
            places.append(number)
    return WantedTokens(tokens, rows, places, num_choices, choosing, num_drafts)


@dataclass(slots=True)
class PendingResult:
    """Results of a step on their way to the host.

    Attributes:
        choices: int32 [rows that choose, 1 + drafts], NOT_REACHED where none stands.
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
        take_in: called with the choices of a row with drafts; returns those up to its output's end, True if it ends.
        device: where the step runs.
    """

    def __init__(
        self,
        forward_input: ForwardInput,
        wanted: WantedTokens,
        finish: Callable[[CUDAStep], PendingResult],
        take_in: Callable[[int, Sequence[int]], tuple[list[int], bool]],
        device: torch.device,
    ) -> None:
        self.forward_input, self.wanted = forward_input, wanted
        self.masks: dict[int, NDArray[np.uint32]] = {}
        self._finish, self._take_in, self._device = finish, take_in, device
        self._pending: PendingResult | None = None
        self._output: StepOutput | None = None
        self._failed = False

    def set_masks(self, masks: Mapping[int, NDArray[np.uint32]]) -> None:
        self.masks.update(masks)

    def sample(self) -> None:
        """Start sampling the step's rows, once, even if that fails. Another step may start only after this."""
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
        """The rows' outputs: columns of choices, and by themselves the rows that have more, or that failed."""
        columns, made = self.forward_input.columns, pending.choices.numpy()
        choices = np.full(len(columns), NO_CHOICE, np.int32)
        choices[self.wanted.choosing] = made[:, 0]
        found: dict[int, TokenLogprobs] = {}
        for places, logprobs in pending.logprobs:
            found.update(zip(places, logprobs.read(), strict=True))
        others: dict[int, RowOutput] = {}
        if columns.only_decodes and not pending.errors:
            self._take_logprobs(found, choices, others)
        logprobs_of = self._by_rows(found)
        apart = {*pending.errors, *pending.pooled, *logprobs_of}
        if self.wanted.num_drafts or made[:, 0].min(initial=0) < 0:
            alone = (columns.num_drafts > 0) | (columns.samples & (columns.num_tokens > 0) & (choices < 0))
            apart.update(alone.nonzero()[0].tolist())
            apart -= others.keys()
        if apart:
            chosen = dict(zip(self.wanted.choosing, made.tolist(), strict=True))
            for index in sorted(apart):
                others[index] = self._row_alone(index, pending, chosen.get(index, ()), logprobs_of)
                choices[index] = NO_CHOICE
        return StepOutput(columns.numbers, choices, others)

    def _take_logprobs(
        self, found: dict[int, TokenLogprobs], choices: NDArray[np.int32], others: dict[int, RowOutput]
    ) -> None:
        """Write outputs of rows with a choice and its log-probability, which leave `found` and `choices`.

        In a step of decodes alone a row's index is also that of its choice. Rows whose numbers can't be used stay.
        """
        numbers, made = self.forward_input.columns.numbers.tolist(), choices.tolist()
        for index, logprobs in list(found.items()):
            if made[index] >= 0 and not math.isnan(logprobs.logprob):
                others[index] = RowOutput(numbers[index], (made[index],), (logprobs,))
                choices[index] = NO_CHOICE
                del found[index]

    def _row_alone(
        self, index: int, pending: PendingResult, choices: Sequence[int],
        logprobs_of: Mapping[int, tuple[list[TokenLogprobs], list[TokenLogprobs]]],
    ) -> RowOutput:  # fmt: skip
        """One row's output. A row whose numbers can't be used gets an error, and the others are unharmed."""
        row, error = self.forward_input.columns.row(index), pending.errors.get(index)
        if error is None:
            try:
                of_choices, of_queries = logprobs_of.get(index, ((), ()))
                return self._row_output(row, choices, of_choices, of_queries, pending.pooled.get(index))
            except RealizarError as raised:
                error = RowError.of(raised, "sampling")
        return RowOutput(row.row, (), error=error)

    def _by_rows(
        self, found: Mapping[int, TokenLogprobs]
    ) -> dict[int, tuple[list[TokenLogprobs], list[TokenLogprobs]]]:
        """Log-probabilities of wanted tokens as those of each row's choices and of its queries, in order."""
        by_rows: dict[int, tuple[list[TokenLogprobs], list[TokenLogprobs]]] = {}
        for index in sorted(found):
            pair = by_rows.setdefault(self.wanted.rows[index], ([], []))
            pair[index >= self.wanted.num_choices].append(found[index])
        return by_rows

    def _row_output(
        self, row: ScheduledRow, choices: Sequence[int], logprobs: Sequence[TokenLogprobs],
        queried: Sequence[TokenLogprobs], vector: torch.Tensor | None,
    ) -> RowOutput:  # fmt: skip
        """One row's results, of which choices that were not reached are left out, and their log-probabilities.

        Raises:
            RealizarError: nothing could be chosen, or a number is not finite.
        """
        standing = self._standing(row, choices)
        logprobs = logprobs[: len(standing)]
        if (logprobs or queried) and any(math.isnan(each.logprob) for each in (*logprobs, *queried)):
            raise RealizarError("the model's logits are not usable: their maximum is not finite")
        pooled = None if vector is None else finite_vector(vector.numpy())
        return RowOutput(row.row, tuple(standing), tuple(logprobs), tuple(queried), pooled)

    def _standing(self, row: ScheduledRow, choices: Sequence[int]) -> Sequence[int]:
        """The choices of a row that stand: those that were reached, up to one that ends the output.

        Raises:
            RealizarError: one that would stand could not be made.
        """
        if choices and not row.num_drafts:
            choices = choices[:1]
            if choices[0] >= 0:
                return choices
        count = next((index for index, token_id in enumerate(choices) if token_id < 0), len(choices))
        standing, ended = choices[:count], False
        if row.num_drafts:
            standing, ended = self._take_in(row.row, standing)
        if ended or count == len(choices) or choices[count] == NOT_REACHED:
            return standing
        if choices[count] == NONE_ALLOWED:
            raise nothing_allowed(row.row in self.masks)
        raise RealizarError("no token can be sampled: the model gave a logit that is not finite")
