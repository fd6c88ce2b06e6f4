"""`AsyncStream`: one open request of an `AsyncEngine`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import TracebackType
from typing import Self

from realizar.errors import RealizarError
from realizar.outputs import ChoiceDelta, RequestOutput


class AsyncStream:
    """A stream of deltas. Iterate it, read `result`, or do both; use it as a context manager, or call `close`.

    Deltas that arrive between two reads are joined, one per choice: a slow consumer gets fewer and larger deltas.
    """

    def __init__(self, request_id: str, abort: Callable[[], None], *, keep_deltas: bool = True) -> None:
        self.request_id = request_id
        self._keep_deltas = keep_deltas
        self._abort = abort
        self._pending: dict[int, list[ChoiceDelta]] = {}
        self._news = asyncio.Event()
        self._end: asyncio.Future[RequestOutput] = asyncio.get_running_loop().create_future()
        self._end.add_done_callback(_retrieve)

    def __aiter__(self) -> AsyncIterator[ChoiceDelta]:
        """Iterate the deltas as they arrive. A stream has one consumer.

        Raises:
            EngineDeadError: the engine stopped.
            RealizarError: the request was closed, or its tokens could not be turned into text.
        """
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[ChoiceDelta]:
        while True:
            while self._pending:
                yield _join(self._pending.pop(next(iter(self._pending))))
            if self.done:
                break
            self._news.clear()
            await self._news.wait()
        self._end.result()

    @property
    def done(self) -> bool:
        """True once the request has ended; unread deltas may be left."""
        return self._end.done()

    async def result(self) -> RequestOutput:
        """Wait for the whole request; raises the same errors as iterating."""
        return await asyncio.shield(self._end)

    def when_done(self, call: Callable[[], None]) -> None:
        """Register a callback for the end of the request."""
        self._end.add_done_callback(lambda _: call())

    def close(self) -> None:
        """Abort the request if it has not ended; its blocks are free after the running step. Idempotent."""
        if not self.done:
            self._abort()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def take_in(self, delta: ChoiceDelta) -> None:
        """Take in a delta. The engine calls this."""
        if self._keep_deltas:
            self._pending.setdefault(delta.choice, []).append(delta)
            self._news.set()

    def end(self, outcome: RequestOutput | RealizarError) -> None:
        """End the stream. The engine calls this."""
        if self._end.done():
            return
        if isinstance(outcome, RealizarError):
            self._end.set_exception(outcome)
        else:
            self._end.set_result(outcome)
        self._news.set()


def _join(deltas: list[ChoiceDelta]) -> ChoiceDelta:
    """Join deltas of one choice."""
    if len(deltas) == 1:
        return deltas[0]
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(logprobs for delta in deltas for logprobs in delta.logprobs),
    )


def _retrieve(end: asyncio.Future[RequestOutput]) -> None:
    """Mark an error as retrieved, so that asyncio does not warn when nobody waits for it."""
    if not end.cancelled():
        end.exception()
