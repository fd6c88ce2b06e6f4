"""`Suspects` keeps a request that crashes engines from ending one engine after another.

A request is identified by its content, since clients send the same content again under new ids. One death says
little: all requests that were open then are suspects, and nearly all are innocent. So a request gets a point for
each death that it was open in, and two points if no other request was open. A request with two points runs while no
other request with two points runs, so that another death identifies it. A request with three points is refused. A
request that ends in any other way is cleared, and all points are forgotten after a while, because the machine may
have been at fault.

A client may disconnect before the step that its request crashes. So requests that were aborted a short while ago
are suspects, just as open ones are.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import replace

import msgspec

from realizar.errors import InvalidRequestError, QueueFullError
from realizar.request import Request

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
