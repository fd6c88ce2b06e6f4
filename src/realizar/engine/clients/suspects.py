"""`Suspects`: requests that were open when an engine died, so that none of them can end one engine after another.

A request is known by its content, since clients send the same again under new ids. One death says little: all requests
that were open then are suspects, and nearly all are innocent. So a point is given for each death that a request was
open in, and two where no other was open. With two points it runs while no other of two points does, so that another
death tells them apart; with three it is refused. Whoever ends in any other way than by a death is cleared, and all is
forgotten after a while: the machine may have been at fault.

A client may leave before the step that its request kills. So requests that were aborted a short while ago are suspects
like those that are open.
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

APART = 2  # points with which a request runs apart from others of as many
REFUSED = 3  # points with which it does not run
_MOST = 4096  # contents remembered
_MOST_WAITING = 64
_MEMORY_S = 600.0
_MAX_ABORTED = 4096  # requests remembered that were aborted of late
_ABORTED_S = 30.0  # an engine may still be at work on a request for so long after its client left


def fingerprint(request: Request) -> bytes:
    """SHA-256 of what a request asks, whoever asks and whenever; its seed, which is often drawn anew, apart."""
    bias = sorted(request.sampling.logit_bias.items())
    sampling = replace(request.sampling, seed=None, logit_bias={})
    content = (request.prompt_token_ids, request.max_tokens, request.pooling, bias, sampling)
    return hashlib.sha256(msgspec.msgpack.encode(content)).digest()


class Suspects:
    """Points of contents, by fingerprint. Used on one event loop.

    Args:
        clock: seconds, monotonic.
    """

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
        """Requests that were aborted of late, of which the engine that runs may still die."""
        oldest_s = self._clock() - _ABORTED_S
        while self._aborted and self._aborted[0][1] < oldest_s:
            self._aborted.popleft()
        return len(self._aborted)

    def note_aborted(self, request: Request) -> None:
        """A request was aborted while the engine may be at work on it."""
        self._aborted.append((fingerprint(request), self._clock()))

    def forget_aborted(self) -> None:
        """The engine is gone: the next one never had those that left."""
        self._aborted.clear()

    def note_death(self, requests: Collection[Request]) -> None:
        """An engine died while these were open. Copies of one request count once: one death says no more of them."""
        now = self._clock()
        num_suspects = len(requests) + self.num_aborted
        keys = [*map(fingerprint, requests), *(key for key, _ in self._aborted)]
        self.forget_aborted()
        for key in dict.fromkeys(keys):
            points = self._points.pop(key, (0, now))[0] + (APART if num_suspects == 1 else 1)
            self._points[key] = points, now
        while len(self._points) > _MOST:
            self._points.popitem(last=False)

    def clear(self, request: Request) -> None:
        """A request ended while the engine lives on."""
        if self._points:
            self._points.pop(fingerprint(request), None)

    async def admit(self, request: Request) -> Callable[[], None]:
        """Wait until a request may run; call what is returned once it has ended, however it did.

        Raises:
            InvalidRequestError: engines died of it.
            QueueFullError: as many wait to run apart as may.
        """
        if self._points_of(request) < APART:
            return _nothing
        self._check(request)
        if self._num_waiting >= _MOST_WAITING:
            raise QueueFullError("requests that were open when the engine stopped run one at a time; try later", 10.0)
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
        if self._points_of(request) >= REFUSED:
            raise InvalidRequestError(
                "the engine stopped each time this request was open; it is refused for the next minutes"
            )

    def _points_of(self, request: Request) -> int:
        oldest_s = self._clock() - _MEMORY_S
        while self._points and next(iter(self._points.values()))[1] < oldest_s:
            self._points.popitem(last=False)
        return self._points.get(fingerprint(request), (0, 0.0))[0] if self._points else 0


def _nothing() -> None:
    """What a request that runs beside all others has to give back."""
