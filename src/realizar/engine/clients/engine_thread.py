"""`EngineThread`: an `AsyncEngine` on an event loop of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar

from realizar.engine.clients.async_engine import AsyncEngine
from realizar.engine.clients.async_link import closed_error
from realizar.engine.clients.async_stream import AsyncStream
from realizar.errors import RealizarError
from realizar.outputs import ChoiceDelta, RequestOutput

_T = TypeVar("_T")


class EngineThread:
    """Runs coroutines of any thread on the engine's loop. Call `close`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self._loop, self._end = asyncio.new_event_loop(), asyncio.Event()
        self._lock = threading.Lock()
        self.closed = False
        self._thread = threading.Thread(target=self._run_loop, name="realizar-engine", daemon=True)
        self._thread.start()
        self.run(engine.start())

    def start(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Start work. It raises EngineDeadError once the engine is closed."""
        with self._lock:
            if not self.closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise closed_error()

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for work, which is cancelled where the caller is interrupted. Raises as `start`."""
        done = self.start(work)
        try:
            return done.result()
        finally:
            done.cancel()

    def stream(self, work: Coroutine[Any, Any, AsyncStream]) -> RequestStream:
        """The stream of a request, which `work` begins. Raises as `run`."""

        async def begin() -> RequestStream:
            return RequestStream(await work, self)

        return self.run(begin())

    def close(self) -> None:
        """End the engine after the running step; waiting callers get EngineDeadError. Idempotent."""
        with self._lock:
            if not self.closed:
                self._loop.call_soon_threadsafe(self._end.set)
            self.closed = True
        if threading.current_thread() is not self._thread:  # where garbage is collected
            self._thread.join()

    def _run_loop(self) -> None:
        self._loop.run_until_complete(self._until_closed())
        self._loop.close()

    async def _until_closed(self) -> None:
        await self._end.wait()
        await self.engine.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others)


class RequestStream:
    """One open request. Iterate its deltas, then read `result`; use it as a context manager, or call `close`."""

    def __init__(self, stream: AsyncStream, thread: EngineThread) -> None:
        """Made on the engine's loop."""
        self._stream, self._thread = stream, thread
        self._deltas: SimpleQueue[ChoiceDelta | None] = SimpleQueue()
        self._whole: Future[RequestOutput] = Future()
        self._reading = asyncio.create_task(self._read())
        self.request_id = stream.request_id

    def __iter__(self) -> Iterator[ChoiceDelta]:
        """Iterate the deltas as they arrive. It raises EngineDeadError if the engine stopped."""
        while (delta := self._deltas.get()) is not None:
            yield delta
        self._deltas.put(None)
        self.result()

    @property
    def done(self) -> bool:
        return self._whole.done()

    def result(self) -> RequestOutput:
        """Wait for the whole request. It raises EngineDeadError if the engine stopped."""
        return self._whole.result()

    def close(self) -> None:
        with suppress(RealizarError):  # which a closed engine raises
            self._thread.run(self._abort())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _read(self) -> None:
        try:
            async for delta in self._stream:
                self._deltas.put(delta)
            self._whole.set_result(await self._stream.result())
        except RealizarError as error:
            self._whole.set_exception(error)
        finally:
            self._deltas.put(None)

    async def _abort(self) -> None:
        self._stream.close()
