"""`AsyncStream`: one open request of an `AsyncEngine`. `Embedding`: the answer of one for a vector."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Self, TypeAlias

from realizar.engine.frontend.outputs import ChoiceDelta, RequestOutput
from realizar.errors import RealizarError
from realizar.outputs import NO_SNAPSHOTS, SnapshotUse

TakeDelta: TypeAlias = Callable[[], ChoiceDelta | None]
"""All that a choice gained since the last call; None if its request has failed."""


class AsyncStream:
    """A stream of deltas. Iterate it, read `result`, or do both; use it as a context manager, or call `close`.

    A delta has all that its choice gained until it is read: a slow consumer gets fewer and larger deltas. `replica` is
    the name of the engine that has the request; empty where there is one alone.
    """

    def __init__(self, request_id: str, abort: Callable[[], None]) -> None:
        self.request_id, self.replica = request_id, ""
        self._abort = abort
        self._news: deque[TakeDelta] = deque()
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Future[None] | None = None
        self._end: asyncio.Future[RequestOutput] = self._loop.create_future()
        self._end.add_done_callback(_retrieve)

    def __aiter__(self) -> AsyncIterator[ChoiceDelta]:
        """Iterate the deltas as they arrive. A stream has one consumer.

        EngineDeadError: the engine stopped. RealizarError: the request was closed, or its text could not be made.
        """
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[ChoiceDelta]:
        while True:
            while self._news:
                if (delta := self._news.popleft()()) is not None:
                    yield delta
            if self.done:
                break
            self._waiting = self._loop.create_future()
            await self._waiting
        self._end.result()

    @property
    def done(self) -> bool:
        """True once the request has ended; unread deltas may be left."""
        return self._end.done()

    async def result(self) -> RequestOutput:
        """Wait for the whole request; raises the same errors as iterating."""
        return await asyncio.shield(self._end)

    def when_done(self, call: Callable[[], None]) -> None:
        self._end.add_done_callback(lambda _: call())

    def close(self) -> None:
        """Abort the request if it has not ended; its blocks are free after the running step. Idempotent."""
        if not self.done:
            self._abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def note(self, take_delta: TakeDelta) -> None:
        """The engine calls this once for each delta that a choice has."""
        self._news.append(take_delta)
        self._wake()

    def end(self, outcome: RequestOutput | RealizarError) -> None:
        if self._end.done():
            return
        if isinstance(outcome, RealizarError):
            self._end.set_exception(outcome)
        else:
            self._end.set_result(outcome)
        self._wake()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)


def _retrieve(end: asyncio.Future[RequestOutput]) -> None:
    """Mark an error as retrieved, so that asyncio does not warn when nobody waits for it."""
    if not end.cancelled():
        end.exception()


@dataclass(frozen=True, slots=True)
class Embedding:
    """A pooled hidden state [hidden_size], and what it took."""

    vector: tuple[float, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    snapshots: SnapshotUse = NO_SNAPSHOTS
