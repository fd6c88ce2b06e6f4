"""`CUDAStep`: a step on its way; its rows are sampled when its result, or the next step, is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.base import ForwardInput
from realizar.backends.cuda.device_errors import step_errors
from realizar.backends.cuda.sampling.logprobs import PendingLogprobs
from realizar.backends.cuda.sampling.sampler import NONE_ALLOWED
from realizar.backends.cuda.sampling.verify import NOT_REACHED
from realizar.backends.row_faults import finite_vector, nothing_allowed
from realizar.batch import NO_CHOICE, RowOutput, StepOutput
from realizar.errors import CapacityError, RealizarError
from realizar.logprob_columns import StepEntry
from realizar.outputs import RowError, TokenLogprobs

TakeIn: TypeAlias = Callable[[NDArray[np.intp], NDArray[np.int32]], tuple[NDArray[np.intp], NDArray[np.bool_]]]
"""Takes in the choices of rows with drafts; see `CUDAStep`."""


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
        return _wanted_of_decodes(len(columns))
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


@lru_cache(maxsize=1024)
def _wanted_of_decodes(count: int) -> WantedTokens:
    """Of as many rows that decode; never changed."""
    return WantedTokens(list(range(count)), list(range(count)), [0] * count, count, list(range(count)), 0)


def _nothing() -> None:
    """For results that are there, in memory of their own."""


@dataclass(slots=True)
class PendingResult:
    """Results of a step on their way to the host.

    Attributes:
        choices: int32 [rows that choose, 1 + drafts], NOT_REACHED where none stands.
        logprobs: of some wanted tokens, by their index.
        pooled: float32 [hidden_size] of rows, by their index in the step.
        errors: of rows that failed on the host, by their index in the step.
        wait: waits for the copies.
        release: called once the results were read; their memory is then used for another step's.
    """

    choices: torch.Tensor
    logprobs: list[tuple[Sequence[int] | NDArray[np.integer[Any]], PendingLogprobs]]
    pooled: dict[int, torch.Tensor]
    errors: dict[int, RowError]
    wait: Callable[[], None] = _nothing
    release: Callable[[], None] = _nothing


class CUDAStep:
    """A submitted step.

    Args:
        finish: samples and starts the copies; called once.
        take_in: called with the numbers of rows with drafts, intp [rows], and their choices, int32 [rows, 1 + drafts],
            some below 0 from where none stands on; returns how many each keeps up to its output's end, intp [rows], and
            whether that is reached, bool [rows].
        device: where the step runs.
    """

    def __init__(
        self,
        forward_input: ForwardInput,
        wanted: WantedTokens,
        finish: Callable[[CUDAStep], PendingResult],
        take_in: TakeIn,
        device: torch.device,
    ) -> None:
        self.forward_input, self.wanted = forward_input, wanted
        self.masks: Mapping[int, NDArray[np.uint32]] = {}
        self.held: frozenset[int] = frozenset()
        self._are_held = np.zeros(0, np.bool_)  # by the numbers of rows
        self._finish, self._take_in, self._device = finish, take_in, device
        self._pending: PendingResult | None = None
        self._output: StepOutput | None = None
        self._failed = False

    def set_masks(self, masks: Mapping[int, NDArray[np.uint32]]) -> None:
        self.masks = {**self.masks, **masks} if self.masks else masks

    def hold(self, rows: Collection[int]) -> None:
        self.held = frozenset(rows)
        self._are_held = np.zeros(int(self.forward_input.columns.numbers.max(initial=-1)) + 1, np.bool_)
        self._are_held[list(self.held)] = True

    def are_held(self, numbers: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """bool [rows], true for each of these rows of the step that makes no choice, as its masks are late."""
        return self._are_held[numbers] if self.held else np.zeros(len(numbers), np.bool_)

    def sample(self) -> None:
        with step_errors(self._device):
            self.start_choices()

    def start_choices(self) -> None:
        """Start sampling the step's rows, once, even if that fails. Another step may start only after this."""
        if self._pending is None and not self._failed:
            self._failed = True
            self._pending = self._finish(self)
            self._failed = False

    def result(self) -> StepOutput:
        if self._output is None:
            with step_errors(self._device):
                self.start_choices()
                if self._pending is None:
                    raise CapacityError("the step's rows could not be sampled")
                self._pending.wait()
                self._output = self._read(self._pending)
                self._pending.release()
        return self._output

    def _read(self, pending: PendingResult) -> StepOutput:
        """The step's columns, and by themselves the rows that have more than choices, or that failed."""
        columns = self.forward_input.columns
        choices, faults = self._standing(pending)
        others: dict[int, RowOutput] = {}
        plain, found = self._take_logprobs(pending, choices)
        logprobs_of = self._by_rows(found) if found else {}
        for index in sorted({*pending.errors, *pending.pooled, *logprobs_of, *faults}):
            others[index] = self._row_alone(index, pending, choices, faults, logprobs_of.get(index, ((), ())))
            if others[index].error is not None:
                choices[index] = NO_CHOICE
        return StepOutput(columns.numbers, choices, others, plain)

    def _standing(self, pending: PendingResult) -> tuple[NDArray[np.int32], dict[int, int]]:
        """The choices that stand, int32 [rows, 1 + drafts], and by index the codes of rows that could not choose."""
        columns, made = self.forward_input.columns, pending.choices.numpy()
        if columns.only_decodes:
            choices = made.copy()
        else:
            choices = np.full((len(columns), made.shape[1]), NO_CHOICE, np.int32)
            choices[self.wanted.choosing] = made
        if not self.wanted.num_drafts and made.min(initial=0) >= 0:
            if self.held:
                choices[self.are_held(columns.numbers)] = NO_CHOICE
            return choices, {}
        chooses = columns.samples & (columns.num_tokens > 0) & ~self.are_held(columns.numbers)
        counts, ended = ((choices[:, 0] >= 0) & chooses).astype(np.intp), np.zeros(len(columns), np.bool_)
        drafted = chooses & (columns.num_drafts > 0)
        drafted[list(pending.errors)] = False
        if drafted.any():
            counts[drafted], ended[drafted] = self._take_in(columns.numbers[drafted], choices[drafted])
        width = choices.shape[1]
        after = choices[np.arange(len(columns)), np.minimum(counts, width - 1)]
        failed = chooses & ~ended & (counts < width) & (after < 0) & (after != NOT_REACHED)
        counts[failed] = 0
        choices[np.arange(width) >= counts[:, None]] = NO_CHOICE
        return choices, {index: int(after[index]) for index in failed.nonzero()[0].tolist()}

    def _take_logprobs(
        self, pending: PendingResult, choices: NDArray[np.int32]
    ) -> tuple[dict[int, StepEntry], dict[int, StepEntry]]:
        """Read the log-probabilities.

        Returns:
            Those of rows that have a choice with its log-probability, and nothing else, by the row's index, and all
            others, by the index of their wanted token.
        """
        plain: dict[int, StepEntry] = {}
        found: dict[int, StepEntry] = {}
        if not pending.logprobs:
            return plain, found
        columns, wanted = self.forward_input.columns, self.wanted
        alone = choices[:, 0] >= 0
        if wanted.num_drafts:
            alone[:] = False
        alone[[*pending.errors, *pending.pooled, *columns.logprob_queries]] = False
        rows = np.arange(len(columns)) if columns.only_decodes else np.array(wanted.rows, np.intp)
        for indices, logprobs in pending.logprobs:
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
        self, index: int, pending: PendingResult, choices: NDArray[np.int32], faults: Mapping[int, int],
        logprobs: tuple[Sequence[TokenLogprobs], Sequence[TokenLogprobs]],
    ) -> RowOutput:  # fmt: skip
        """One row's output. A row whose numbers can't be used gets an error, and the others are unharmed."""
        number, error = int(self.forward_input.columns.numbers[index]), pending.errors.get(index)
        if error is None:
            try:
                if index in faults:
                    raise self._fault(number, faults[index])
                token_ids = tuple([token_id for token_id in choices[index].tolist() if token_id != NO_CHOICE])
                return _row_output(number, token_ids, *logprobs, pending.pooled.get(index))
            except RealizarError as raised:
                error = RowError.of(raised, "sampling")
        return RowOutput(number, (), error=error)

    def _fault(self, number: int, code: int) -> RealizarError:
        """The error of a row whose choice is a code below 0."""
        if code == NONE_ALLOWED:
            return nothing_allowed(number in self.masks)
        return RealizarError("no token can be sampled: the model gave a logit that is not finite")

    def _by_rows(self, found: Mapping[int, StepEntry]) -> dict[int, tuple[list[TokenLogprobs], list[TokenLogprobs]]]:
        """Log-probabilities of wanted tokens as those of each row's choices and of its queries, in order."""
        by_rows: dict[int, tuple[list[TokenLogprobs], list[TokenLogprobs]]] = {}
        for index in sorted(found):
            pair = by_rows.setdefault(self.wanted.rows[index], ([], []))
            pair[index >= self.wanted.num_choices].append(found[index][0])
        return by_rows


def _row_output(
    number: int, token_ids: tuple[int, ...], logprobs: Sequence[TokenLogprobs], queried: Sequence[TokenLogprobs],
    vector: torch.Tensor | None,
) -> RowOutput:  # fmt: skip
    """One row's results; log-probabilities of choices that do not stand are left out.

    Raises:
        RealizarError: a number is not finite.
    """
    logprobs = logprobs[: len(token_ids)]
    if (logprobs or queried) and any(math.isnan(each.logprob) for each in (*logprobs, *queried)):
        raise RealizarError("the model's logits are not usable: their maximum is not finite")
    pooled = None if vector is None else finite_vector(vector.numpy())
    return RowOutput(number, token_ids, tuple(logprobs), tuple(queried), pooled)
