"""`OpenRequests`: the requests that an `AsyncEngine` has open. Deltas of steps become those of streams, and outputs."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from realizar.engine.frontend.async_stream import AsyncStream, TakeDelta
from realizar.engine.frontend.growing_choice import GrowingChoice, GrowingLogprobs, GrowingText
from realizar.engine.frontend.open_table import OpenTable
from realizar.engine.frontend.outputs import ChoiceDelta, RequestOutput, Timings
from realizar.engine.frontend.places import Places
from realizar.engine.frontend.suspects import Suspects
from realizar.engine.process.messages import Abort, Add, PromptRead, RequestsLost
from realizar.errors import InvalidRequestError, RealizarError, RequestFailedError, StepMemoryError
from realizar.ipc.error_records import restore_error
from realizar.outputs import DraftUse, RowError, SnapshotUse
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.step_deltas import ChoiceEnd, ChoiceStart, StepDeltas, StepLogprobs

_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    """An open request; `accepted` is done once the engine has queued or refused it."""

    request: Request
    prompt: str | None
    stream: AsyncStream
    accepted: asyncio.Future[None]
    choices: list[GrowingChoice]
    num_growing: int
    prompt_logprobs: GrowingLogprobs = field(default_factory=GrowingLogprobs)
    scheduled_s: float | None = None
    first_token_s: float | None = None
    pooled: tuple[float, ...] | None = None


class OpenRequests:
    """Owns every open request on the client's side, with its stream and its text.

    Attributes:
        suspects: requests that were open when an engine died, or had just been aborted.
        places: of the choices of all open requests.

    Args:
        new_text: makes the text of a choice from the request's sampling parameters.
        on_empty: called when the last open request has ended.
        keeps_logprobs: where it is False, the whole output of a request whose deltas are wanted has no
            log-probabilities of its tokens.
    """

    def __init__(
        self,
        new_text: Callable[[SamplingParams], GrowingText],
        send: Callable[[Add | Abort], None],
        on_empty: Callable[[], None],
        *,
        keeps_logprobs: bool = False,
    ) -> None:
        self._new_text, self._send, self._on_empty = new_text, send, on_empty
        self._keeps_logprobs = keeps_logprobs
        self._open: OpenTable[_Open] = OpenTable()
        self._growing: dict[int, GrowingChoice] = {}  # by the engine's numbers
        self._first_wanted: dict[int, _Open] = {}  # those whose first token has not come, by the same
        self.suspects = Suspects()
        self.places = Places()
        self._last_end_s: float | None = None
        self._end_interval_s = 0.0

    def __len__(self) -> int:
        return len(self._open)

    def wait_s(self, num_before: int) -> float:
        """The estimated seconds until `num_before` choices have ended, by the recent rate: a whole number, 1 to 60."""
        return float(min(max(math.ceil(self._end_interval_s * num_before), 1), 60))

    async def submit(self, request: Request, prompt: str | None, *, keep_deltas: bool) -> AsyncStream:
        """Send a request and wait until the engine has queued it; raises the engine's refusal."""
        request_id = request.request_id
        if request_id in self._open:
            raise InvalidRequestError(f"request id {request_id!r} is in use", "request_id")
        stream = AsyncStream(request_id, lambda: self._abort(request_id))
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        choices = self._new_choices(request, stream.note if keep_deltas else None)
        self._open[request_id] = _Open(request, prompt, stream, accepted, choices, len(choices))
        self.places.take(request.client, request.sampling.n)
        try:
            self._send(Add(request))
            await accepted
        except BaseException:
            stream.close()
            raise
        return stream

    def _new_choices(self, request: Request, on_news: Callable[[TakeDelta], None] | None) -> list[GrowingChoice]:
        def fail(error: Exception) -> None:
            _LOG.error("the text of %s failed", request.request_id, exc_info=error)
            self._abort(request.request_id, RequestFailedError("the tokens could not be turned into text"))

        keeps = self._keeps_logprobs or on_news is None
        return [
            GrowingChoice(
                request.request_id, index, self._new_text(request.sampling), fail, on_news, keeps_logprobs=keeps
            )
            for index in range(request.sampling.n)
        ]

    def answer(self, request_id: str, error: RealizarError | None, replica: str = "") -> None:
        """Note that one engine of several, `replica`, has queued a request, or refused it with an error."""
        entry = self._open.get(request_id)
        if entry is not None:
            entry.stream.replica = replica
        if entry is None or entry.accepted.done():
            return
        if error is None:
            entry.accepted.set_result(None)
        else:
            self._end(request_id, error)

    def lose(self, event: RequestsLost) -> None:
        if event.blame:
            suspects = [self._open[each].request for each in event.suspects if each in self._open]
            self.suspects.note_death(suspects)
        error = restore_error(event.error)
        for request_id in event.request_ids:
            if request_id in self._open:
                self._end(request_id, error)

    def note_progress(self, event: PromptRead) -> None:
        entry = self._open.get(event.request_id)
        if entry is not None:
            cached = event.progress.num_cached_tokens
            delta = ChoiceDelta(event.request_id, 0, "", (), num_cached_tokens=cached, prompt_progress=event.progress)
            entry.stream.note(lambda: delta)

    @property
    def may_be_to_blame(self) -> bool:
        """True if the engine may die of a request: one that is open, or was aborted a short while ago."""
        return bool(self._open) or self.suspects.num_aborted > 0

    def suspect_all(self) -> None:
        self.suspects.note_death([entry.request for entry in self._open.values()])

    def fail(self, error: RealizarError) -> None:
        """End all requests, as their engine is gone."""
        self.suspects.forget_aborted()
        for request_id in list(self._open):
            self._end(request_id, error)

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
        for number, token_id in zip(numbers, token_ids, strict=True):
            choice = growing.get(number)
            if choice is None:
                continue
            if not choice.may_stop:
                choice.token_ids.append(token_id)
            elif choice.stops_at(token_id):
                self._end_growing(number, choice, deltas.produced_s)
                continue
            if not choice.is_noted:
                choice.note()
        for end in deltas.ends:
            self._take_end(end, deltas.produced_s)
        for failure in deltas.failures:
            if (start := self._open.start_of(failure.number)) is not None:
                self.suspects.clear(self._open[start.request_id].request)
                self._end(start.request_id, error_of(failure.error))

    def _take_in_facts(self, deltas: StepDeltas) -> None:
        self._open.note_starts(deltas.starts)
        for start in deltas.starts:
            if (entry := self._open.get(start.request_id)) is not None:
                self._start(entry, start)
        for part in deltas.snapshots:
            if (choice := self._growing.get(part.number)) is not None:
                choice.snapshots = part.use
        for scored in deltas.prompt_logprobs:
            self._take_scored(scored)

    def end_choice(self, request_id: str, index: int) -> None:
        """End a choice at a stop string that was found elsewhere. One that has ended, or was never begun, passes."""
        for number in self._open.numbers_of(request_id):
            choice = self._growing.get(number)
            if choice is not None and choice.index == index:
                choice.finish("stop", "")
                self._end_growing(number, choice, time.monotonic())

    def _start(self, entry: _Open, start: ChoiceStart) -> None:
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
                self._open[choice.request_id].prompt_logprobs.take(scored.entries, place)
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
        self._open[choice.request_id].pooled, choice.drafts = end.pooled, end.drafts
        self._end_growing(end.number, choice, now_s)

    def _end_growing(self, number: int, choice: GrowingChoice, now_s: float) -> None:
        """End a choice. Where its stop string was found here, the engine goes on until the abort."""
        request_id, entry = choice.request_id, self._open[choice.request_id]
        del self._growing[number]
        self._first_wanted.pop(number, None)
        if entry.first_token_s is None:
            entry.first_token_s = now_s
        choice.note()
        if isinstance(choice.stop_reason, str):
            self._send(Abort(request_id, choice.index))
        self._note_end()
        entry.num_growing -= 1
        if not entry.num_growing:
            self.suspects.clear(entry.request)
            if isinstance(choice.stop_reason, str):
                self.suspects.note_aborted(entry.request)
            self._forget(request_id)
            entry.stream.end(_output_of(entry, now_s))

    def _abort(self, request_id: str, error: RealizarError | None = None) -> None:
        if request_id in self._open:
            self._send(Abort(request_id))
            self.suspects.note_aborted(self._open[request_id].request)
            self._end(request_id, error or RealizarError("the request was closed"))

    def _end(self, request_id: str, error: RealizarError) -> None:
        entry = self._open[request_id]
        self._forget(request_id)
        entry.stream.end(error)
        if not entry.accepted.done():
            entry.accepted.set_exception(error)
            entry.accepted.exception()  # retrieved: nobody waits for it where the request could not even be sent

    def _forget(self, request_id: str) -> None:
        for number in self._open.numbers_of(request_id):
            self._growing.pop(number, None)
            self._first_wanted.pop(number, None)
        request = self._open[request_id].request
        self._open.forget(request_id)
        self.places.give(request.client, request.sampling.n)
        if not self._open:
            self._on_empty()

    def _note_end(self) -> None:
        now = time.monotonic()
        if self._last_end_s is not None:
            self._end_interval_s += 0.2 * (now - self._last_end_s - self._end_interval_s)
        self._last_end_s = now


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
        drafts=DraftUse.total(choice.drafts for choice in entry.choices),
    )


def error_of(error: RowError) -> RealizarError:
    if error.cause == "request":
        return InvalidRequestError(error.message, error.param)
    return StepMemoryError(error.message) if error.cause == "memory" else RequestFailedError(error.message)
