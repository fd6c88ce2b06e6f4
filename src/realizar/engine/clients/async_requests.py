"""`OpenRequests`: the requests that an `AsyncEngine` has open, with their streams and their text."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import msgspec

from realizar.engine.clients.async_stream import AsyncStream
from realizar.engine.clients.growing_choice import GrowingChoice, GrowingText
from realizar.engine.clients.output_processor import OutputProcessor
from realizar.engine.clients.places import Places
from realizar.engine.process.messages import Abort, Add, PromptRead, RequestsLost, restore_error
from realizar.errors import InvalidRequestError, QueueFullError, RealizarError, RequestFailedError
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
    delta: ChoiceDelta

    def take_delta(self) -> ChoiceDelta:
        return self.delta


class OpenRequests:
    """Owns every open request on the client's side, as the `OutputListener`.

    Attributes:
        suspects: requests that were open when an engine died, or had just been aborted.
        places: of the choices of all open requests.

    Args:
        new_text, keeps_logprobs: as of `AsyncEngine`.
        on_empty: called when the last open request has ended.
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
            entry.stream.note(_Noted(delta))

    def take_in(self, deltas: StepDeltas) -> None:
        """Distribute a step's deltas; those of requests that are not open are ignored."""
        self._processor.take_in(deltas)

    def end_choice(self, request_id: str, choice: int) -> None:
        self._processor.end_choice(request_id, choice)

    def choice_ended(self, choice: GrowingChoice) -> None:
        if isinstance(choice.stop_reason, str):
            self._send(Abort(choice.request_id, choice.index))
        self._note_end()

    def request_ended(self, output: RequestOutput, last: GrowingChoice) -> None:
        entry = self._open[output.request_id]
        self.suspects.clear(entry.request)
        if isinstance(last.stop_reason, str):  # the stop string was found here: the engine goes on until the abort
            self.suspects.note_aborted(entry.request)
        self._forget(output.request_id)
        entry.stream.end(output)

    def request_failed(self, request_id: str, error: RealizarError) -> None:
        self.suspects.clear(self._open[request_id].request)
        self._end(request_id, error)

    def text_failed(self, request_id: str) -> None:
        self._abort(request_id, RequestFailedError("the tokens could not be turned into text"))

    @property
    def may_be_to_blame(self) -> bool:
        """True if the engine may die of a request: one that is open, or was aborted a short while ago."""
        return bool(self._open) or self.suspects.num_aborted > 0

    def suspect_all(self) -> None:
        self.suspects.note_death([entry.request for entry in self._open.values()])

    def fail(self, error: RealizarError) -> None:
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
        now = time.monotonic()
        if self._last_end_s is not None:
            self._end_interval_s += 0.2 * (now - self._last_end_s - self._end_interval_s)
        self._last_end_s = now


# `Suspects` keeps a request that crashes engines from ending one engine after another.
#
# A request is identified by its content, since clients send the same content again under new ids. One death says
# little: all requests that were open then are suspects, and nearly all are innocent. So a request gets a point for
# each death that it was open in, and two points if no other request was open. A request with two points runs while no
# other request with two points runs, so that another death identifies it. A request with three points is refused. A
# request that ends in any other way is cleared, and all points are forgotten after a while, because the machine may
# have been at fault.
#
# A client may disconnect before the step that its request crashes. So requests that were aborted a short while ago
# are suspects, just as open ones are.

_APART = 2  # points from which a request runs apart from other suspects
_REFUSED = 3  # points from which a request is refused
_MOST = 4096  # remembered contents
_MOST_WAITING = 64
_MEMORY_S = 600.0
_MAX_ABORTED = 4096  # remembered requests that were aborted
_ABORTED_S = 30.0  # for so long after the abort, an engine may still work on a request


def fingerprint(request: Request) -> bytes:
    """SHA-256 of a request's content, without its id, client, time and seed (which is often drawn anew)."""
    bias = sorted(request.sampling.logit_bias.items())
    sampling = replace(request.sampling, seed=None, logit_bias={})
    given = [(run.start, run.digests) for run in request.embeddings]
    content = (request.prompt_token_ids, request.max_tokens, request.pooling, bias, sampling, given)
    return hashlib.sha256(msgspec.msgpack.encode(content)).digest()


class Suspects:
    """The points of each request's content, by fingerprint. One event loop uses it. `clock`: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._points: OrderedDict[bytes, tuple[int, float]] = OrderedDict()  # and when the last came, oldest first
        self._aborted: deque[tuple[bytes, float]] = deque(maxlen=_MAX_ABORTED)  # and when, oldest first
        self._apart = asyncio.Lock()
        self._num_waiting = 0

    def __len__(self) -> int:
        return len(self._points)

    @property
    def num_aborted(self) -> int:
        """The number of recently aborted requests that the running engine may still die of."""
        oldest_s = self._clock() - _ABORTED_S
        while self._aborted and self._aborted[0][1] < oldest_s:
            self._aborted.popleft()
        return len(self._aborted)

    def note_aborted(self, request: Request) -> None:
        self._aborted.append((fingerprint(request), self._clock()))

    def forget_aborted(self) -> None:
        self._aborted.clear()

    def note_death(self, requests: Collection[Request]) -> None:
        """Give points for an engine's death while these requests were open. Copies of one request count once."""
        now = self._clock()
        num_suspects = len(requests) + self.num_aborted
        keys = [*map(fingerprint, requests), *(key for key, _ in self._aborted)]
        self.forget_aborted()
        for key in dict.fromkeys(keys):
            points = self._points.pop(key, (0, now))[0] + (_APART if num_suspects == 1 else 1)
            self._points[key] = points, now
        while len(self._points) > _MOST:
            self._points.popitem(last=False)

    def clear(self, request: Request) -> None:
        if self._points:
            self._points.pop(fingerprint(request), None)

    async def admit(self, request: Request) -> Callable[[], None]:
        """Wait until a request may run; call the returned function when it has ended.

        InvalidRequestError: engines died of it. QueueFullError: too many suspects wait to run.
        """
        if self._points_of(request) < _APART:
            return _nothing
        self._check(request)
        if self._num_waiting >= _MOST_WAITING:
            raise QueueFullError(
                "requests that were open when the engine stopped run one at a time; try again later", 10.0
            )
        self._num_waiting += 1
        try:
            await self._apart.acquire()
        finally:
            self._num_waiting -= 1
        try:
            self._check(request)
        except BaseException:
            self._apart.release()
            raise
        return self._apart.release

    def _check(self, request: Request) -> None:
        if self._points_of(request) >= _REFUSED:
            raise InvalidRequestError(
                "the engine stopped each time this request was open; it is refused for the next minutes"
            )

    def _points_of(self, request: Request) -> int:
        oldest_s = self._clock() - _MEMORY_S
        while self._points and next(iter(self._points.values()))[1] < oldest_s:
            self._points.popitem(last=False)
        return self._points.get(fingerprint(request), (0, 0.0))[0] if self._points else 0


def _nothing() -> None:
    """The release of a request that is no suspect: it has nothing to release."""
