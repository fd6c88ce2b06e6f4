"""`OutputProcessor` turns the deltas of steps into those of streams, and into whole outputs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from realizar.engine.clients.growing_choice import GrowingChoice, GrowingText
from realizar.errors import InvalidRequestError, RealizarError, RequestFailedError, StepMemoryError
from realizar.logprob_columns import GrowingLogprobs
from realizar.outputs import RequestOutput, RowError, SnapshotUse, Timings
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.step_deltas import ChoiceEnd, ChoiceStart, StepDeltas, StepLogprobs

_LOG = logging.getLogger(__name__)


class OutputListener(Protocol):
    """Receives the ends that a step brings, while `OutputProcessor.take_in` runs."""

    def choice_ended(self, choice: GrowingChoice) -> None:
        """Called at the end of a choice. Where its `stop_reason` is a string, the engine still has it: abort it."""

    def request_ended(self, output: RequestOutput, last: GrowingChoice) -> None:
        """Called when all choices of a request have ended, `last` the last of them. The request is forgotten."""

    def request_failed(self, request_id: str, error: RealizarError) -> None:
        """Called when the engine has ended a request without its output. The request is forgotten."""

    def text_failed(self, request_id: str) -> None:
        """Called when a request's tokens could not be turned into text. The listener discards it and aborts it."""


@dataclass(slots=True)
class _Open:
    request: Request
    prompt: str | None
    choices: list[GrowingChoice]
    num_growing: int
    numbers: list[int] = field(default_factory=list)
    prompt_logprobs: GrowingLogprobs = field(default_factory=GrowingLogprobs)
    scheduled_s: float | None = None
    first_token_s: float | None = None
    pooled: tuple[float, ...] | None = None


class OutputProcessor:
    """Owns the choices of every open request.

    `new_text` makes the text of a choice from the request's sampling parameters. Where `keeps_logprobs` is False, the
    whole output of a request whose deltas are wanted has no log-probabilities of its tokens.
    """

    def __init__(
        self,
        new_text: Callable[[SamplingParams], GrowingText],
        listener: OutputListener,
        *,
        keeps_logprobs: bool = True,
    ) -> None:
        self._new_text, self._listener, self._keeps_logprobs = new_text, listener, keeps_logprobs
        self._open: dict[str, _Open] = {}
        self._numbered: dict[int, _Open] = {}  # by the engine's numbers of their choices
        self._growing: dict[int, GrowingChoice] = {}  # by the same
        self._first_wanted: dict[int, _Open] = {}  # those whose first token has not come

    def add(self, request: Request, prompt: str | None, on_news: Callable[[GrowingChoice], None] | None) -> None:
        """Start a request.

        Args:
            on_news: called with a choice that has a delta to take; not called again before that is taken. None if only
                the whole output is wanted.
        """
        request_id, number = request.request_id, request.sampling.n

        def fail(error: Exception) -> None:
            _LOG.error("the text of %s failed", request_id, exc_info=error)
            self._listener.text_failed(request_id)

        keeps = self._keeps_logprobs or on_news is None
        choices = [
            GrowingChoice(request_id, index, self._new_text(request.sampling), fail, on_news, keeps_logprobs=keeps)
            for index in range(number)
        ]
        self._open[request_id] = _Open(request, prompt, choices, number)

    def discard(self, request_id: str) -> None:
        entry = self._open.pop(request_id, None)
        for number in () if entry is None else entry.numbers:
            for by_number in (self._numbered, self._growing, self._first_wanted):
                by_number.pop(number, None)

    def discard_all(self) -> None:
        """Forget every request, since their engine is gone; another one gives numbers anew."""
        for kept in (self._open, self._numbered, self._growing, self._first_wanted):
            kept.clear()

    def take_in(self, deltas: StepDeltas) -> None:
        """Take in a step. Choices that are not open are passed over: they were aborted a moment ago."""
        self._take_in_facts(deltas)
        growing = self._growing
        for part in deltas.logprobs:
            entries = part.entries
            for place, number in enumerate(part.number_list()):
                if (choice := growing.get(number)) is not None:
                    choice.take_logprobs(entries, place)
        numbers, token_ids = deltas.number_list(), deltas.token_list()
        if self._first_wanted:
            self._note_first(numbers, deltas.produced_s)
        if deltas.counts:
            numbers = [number for number, count in zip(numbers, deltas.count_list(), strict=True) for _ in range(count)]
        for number, token_id in zip(numbers, token_ids, strict=True):
            choice = growing.get(number)
            if choice is None:
                continue
            if not choice.may_stop:
                choice.token_ids.append(token_id)
            elif choice.stops_at(token_id):
                self._end(number, choice, deltas.produced_s)
                continue
            if not choice.is_noted:
                choice.note()
        for end in deltas.ends:
            self._take_end(end, deltas.produced_s)
        for failure in deltas.failures:
            if (entry := self._numbered.get(failure.number)) is not None:
                self.discard(entry.request.request_id)
                self._listener.request_failed(entry.request.request_id, error_of(failure.error))

    def _take_in_facts(self, deltas: StepDeltas) -> None:
        for start in deltas.starts:
            self._start(start)
        for part in deltas.snapshots:
            if (choice := self._growing.get(part.number)) is not None:
                choice.snapshots = part.use
        for scored in deltas.prompt_logprobs:
            self._take_scored(scored)

    def end_choice(self, request_id: str, index: int) -> None:
        """End a choice at a stop string that was found elsewhere. One that has ended, or was never begun, passes."""
        entry = self._open.get(request_id)
        for number in () if entry is None else entry.numbers:
            choice = self._growing.get(number)
            if choice is not None and choice.index == index:
                choice.finish_reason, choice.stop_reason = "stop", ""
                self._end(number, choice, time.monotonic())

    def _start(self, start: ChoiceStart) -> None:
        entry = self._open.get(start.request_id)
        if entry is None:
            return
        entry.numbers.append(start.number)
        self._numbered[start.number] = entry
        choice = self._growing[start.number] = entry.choices[start.choice]
        if entry.scheduled_s is None:
            entry.scheduled_s = start.scheduled_s
        if entry.first_token_s is None:
            self._first_wanted[start.number] = entry
        if choice.index == 0:
            for each in entry.choices:
                each.num_cached_tokens = start.num_cached_tokens

    def _take_scored(self, scored: StepLogprobs) -> None:
        """Take in log-probabilities of prompts; a delta without tokens reports that the prompt is read."""
        for place, number in enumerate(scored.number_list()):
            choice = self._growing.get(number)
            if choice is not None:
                self._numbered[number].prompt_logprobs.take(scored.entries, place)
                choice.note()

    def _note_first(self, numbers: Iterable[int], now_s: float) -> None:
        for number in numbers:
            entry = self._first_wanted.pop(number, None)
            if entry is not None and entry.first_token_s is None:
                entry.first_token_s = now_s

    def _take_end(self, end: ChoiceEnd, now_s: float) -> None:
        choice = self._growing.get(end.number)
        if choice is None or not choice.end(end.finish_reason, end.stop_token_id):
            return
        self._numbered[end.number].pooled = end.pooled
        self._end(end.number, choice, now_s)

    def _end(self, number: int, choice: GrowingChoice, now_s: float) -> None:
        entry = self._numbered[number]
        del self._growing[number]
        self._first_wanted.pop(number, None)
        if entry.first_token_s is None:
            entry.first_token_s = now_s
        choice.note()
        self._listener.choice_ended(choice)
        entry.num_growing -= 1
        if not entry.num_growing:
            self.discard(entry.request.request_id)
            self._listener.request_ended(_output_of(entry, now_s), choice)


def _output_of(entry: _Open, now_s: float) -> RequestOutput:
    request, sampling = entry.request, entry.request.sampling
    scored = entry.prompt_logprobs.between(0, len(entry.prompt_logprobs))
    return RequestOutput(
        request_id=request.request_id,
        prompt=entry.prompt,
        prompt_token_ids=request.prompt_token_ids,
        outputs=tuple(choice.completion(with_logprobs=sampling.logprobs is not None) for choice in entry.choices),
        timings=Timings(
            arrival_s=request.arrival_s,
            scheduled_s=now_s if entry.scheduled_s is None else entry.scheduled_s,
            first_token_s=now_s if entry.first_token_s is None else entry.first_token_s,
            finished_s=now_s,
        ),
        prompt_logprobs=None if sampling.prompt_logprobs is None else (None, *scored),
        num_cached_tokens=entry.choices[0].num_cached_tokens,
        snapshots=SnapshotUse.total(choice.snapshots for choice in entry.choices),
        pooled=entry.pooled,
    )


def error_of(error: RowError) -> RealizarError:
    if error.cause == "request":
        return InvalidRequestError(error.message, error.param)
    return StepMemoryError(error.message) if error.cause == "memory" else RequestFailedError(error.message)
