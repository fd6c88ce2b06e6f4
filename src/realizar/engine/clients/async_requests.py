"""`OpenRequests`: the requests that an `AsyncEngine` has open, with their streams and their text."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from realizar.engine.clients.async_stream import AsyncStream
from realizar.engine.clients.growing_choice import GrowingChoice, GrowingText
from realizar.engine.clients.output_processor import OutputProcessor
from realizar.engine.clients.places import Places
from realizar.engine.clients.suspects import Suspects
from realizar.engine.process.messages import Abort, Add, PromptRead, RequestsLost, restore_error
from realizar.errors import InvalidRequestError, RealizarError, RequestFailedError
from realizar.outputs import ChoiceDelta, RequestOutput
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.step_deltas import StepDeltas


@dataclass(frozen=True, slots=True)
class _Open:
    """An open request; `accepted` is done once the engine has queued or refused it."""

    stream: AsyncStream
    request: Request
    accepted: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class _Noted:
    """A delta that no choice makes, as a `DeltaSource`."""

    delta: ChoiceDelta

    def take_delta(self) -> ChoiceDelta:
        return self.delta


class OpenRequests:
    """Owns every open request on the client's side.

    Attributes:
        suspects: requests that were open when an engine died, or had just been aborted.
        places: of the choices of all open requests.

    Args:
        new_text: makes the text of a choice from the request's sampling parameters.
        send: passes a command to the engine.
        on_empty: called when the last open request has ended.
        keeps_logprobs: True if whole outputs have the log-probabilities that deltas had.
    """

    def __init__(
        self,
        new_text: Callable[[SamplingParams], GrowingText],
        send: Callable[[Add | Abort], None],
        on_empty: Callable[[], None],
        *,
        keeps_logprobs: bool = False,
    ) -> None:
        self._processor = OutputProcessor(new_text, self, keeps_logprobs=keeps_logprobs)
        self._send, self._on_empty = send, on_empty
        self._open: dict[str, _Open] = {}
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
        self._processor.add(request, prompt, stream.note if keep_deltas else None)
        self._open[request_id] = _Open(stream, request, accepted)
        self.places.take(request.client, request.sampling.n)
        try:
            self._send(Add(request))
            await accepted
        except BaseException:
            stream.close()
            raise
        return stream

    def answer(self, request_id: str, error: RealizarError | None, replica: str = "") -> None:
        """Note that the engine has queued a request, or refused it with an error.

        Args:
            replica: the name of the one that has it, of several.
        """
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
        """End some requests with an error, since one of several engines is gone."""
        if event.blame:
            suspects = [self._open[each].request for each in event.suspects if each in self._open]
            self.suspects.note_death(suspects)
        error = restore_error(event.error)
        for request_id in event.request_ids:
            if request_id in self._open:
                self._end(request_id, error)

    def note_progress(self, event: PromptRead) -> None:
        """Tell the consumer of a stream how much of the prompt has been read."""
        entry = self._open.get(event.request_id)
        if entry is not None:
            cached = event.progress.num_cached_tokens
            delta = ChoiceDelta(event.request_id, 0, "", (), num_cached_tokens=cached, prompt_progress=event.progress)
            entry.stream.note(_Noted(delta))

    def take_in(self, deltas: StepDeltas) -> None:
        """Distribute a step's deltas; those of requests that are not open are ignored."""
        self._processor.take_in(deltas)

    def end_choice(self, request_id: str, choice: int) -> None:
        """End a choice whose text is complete."""
        self._processor.end_choice(request_id, choice)

    def choice_ended(self, choice: GrowingChoice) -> None:
        """See `OutputListener`."""
        if isinstance(choice.stop_reason, str):
            self._send(Abort(choice.request_id, choice.index))
        self._note_end()

    def request_ended(self, output: RequestOutput, last: GrowingChoice) -> None:
        """See `OutputListener`."""
        entry = self._open[output.request_id]
        self.suspects.clear(entry.request)
        if isinstance(last.stop_reason, str):  # the stop string was found here: the engine goes on until the abort
            self.suspects.note_aborted(entry.request)
        self._forget(output.request_id)
        entry.stream.end(output)

    def request_failed(self, request_id: str, error: RealizarError) -> None:
        """See `OutputListener`."""
        self.suspects.clear(self._open[request_id].request)
        self._end(request_id, error)

    def text_failed(self, request_id: str) -> None:
        """See `OutputListener`."""
        self._abort(request_id, RequestFailedError("the tokens could not be turned into text"))

    @property
    def may_be_to_blame(self) -> bool:
        """True if the engine may die of a request: one that is open, or was aborted a short while ago."""
        return bool(self._open) or self.suspects.num_aborted > 0

    def suspect_all(self) -> None:
        """Note an engine's death that an open or just aborted request may have caused."""
        self.suspects.note_death([entry.request for entry in self._open.values()])

    def fail(self, error: RealizarError) -> None:
        """End every open request with an error, since its engine is gone."""
        self.suspects.forget_aborted()
        for request_id in list(self._open):
            self._end(request_id, error)
        self._processor.discard_all()

    def _abort(self, request_id: str, error: RealizarError | None = None) -> None:
        if request_id in self._open:
            self._send(Abort(request_id))
            self.suspects.note_aborted(self._open[request_id].request)
            self._end(request_id, error or RealizarError("the request was closed"))

    def _end(self, request_id: str, error: RealizarError) -> None:
        entry = self._open[request_id]
        self._processor.discard(request_id)
        self._forget(request_id)
        entry.stream.end(error)
        if not entry.accepted.done():
            entry.accepted.set_exception(error)
            entry.accepted.exception()  # retrieved: nobody waits for it where the request could not even be sent

    def _forget(self, request_id: str) -> None:
        request = self._open.pop(request_id).request
        self.places.give(request.client, request.sampling.n)
        if not self._open:
            self._on_empty()

    def _note_end(self) -> None:
        """A moving average of the time between ends, for `wait_s`."""
        now = time.monotonic()
        if self._last_end_s is not None:
            self._end_interval_s += 0.2 * (now - self._last_end_s - self._end_interval_s)
        self._last_end_s = now
