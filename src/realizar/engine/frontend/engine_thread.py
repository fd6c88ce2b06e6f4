"""`EngineThread`: an `AsyncEngine` on an event loop of its own, for callers that have none."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Self, TypeVar

from realizar.engine.frontend.async_engine import AsyncEngine
from realizar.engine.frontend.async_link import closed_error
from realizar.engine.frontend.async_stream import AsyncStream
from realizar.engine.frontend.outputs import ChoiceDelta, RequestOutput
from realizar.errors import EngineDeadError, RealizarError

_T = TypeVar("_T")
_FORKED = "the engine runs in the process that this one was forked from; make a new LLM here"


class EngineThread:
    """Runs coroutines of any thread on the engine's loop. It ends by `close`, or with its last holder."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self._loop, self._ended = asyncio.new_event_loop(), asyncio.Event()
        self._lock = threading.Lock()
        self.closed = False
        self._thread = threading.Thread(
            target=_run_loop, args=(self._loop, engine, self._ended), name="realizar-engine", daemon=True
        )
        weakref.finalize(self, _end, self._loop, self._ended, self._thread)
        self._thread.start()
        self.run(engine.start())

    @property
    def may_wait(self) -> bool:
        """False where the loop does not run (as after a fork), or where waiting for it would stop it."""
        return self._thread.is_alive() and threading.current_thread() is not self._thread

    def start(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Start work. It raises EngineDeadError once the engine is closed, and in a process forked since."""
        with self._lock:
            if not self.closed and self._thread.is_alive():
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise closed_error() if self.closed else EngineDeadError(_FORKED)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for work, which is cancelled where the caller is interrupted. Raises as `start`."""
        done = self.start(work)
        try:
            return done.result()
        finally:
            done.cancel()
            del done  # which has the error, whose traceback has this frame

    def stream(self, work: Coroutine[Any, Any, AsyncStream]) -> RequestStream:
        """The stream of a request, which `work` begins. Raises as `run`."""

        async def begin() -> RequestStream:
            return RequestStream(await work, self)

        return self.run(begin())

    def call_soon(self, call: Callable[[], None], owner: object) -> weakref.finalize[..., Any]:
        """What calls on the loop, without waiting: when it is called, or when nobody has `owner` any more."""
        return weakref.finalize(owner, _call_soon, self._loop, call)

    def close(self) -> None:
        """End the engine after the running step; waiting callers get EngineDeadError. Idempotent."""
        with self._lock:
            self.closed = True
        _end(self._loop, self._ended, self._thread)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # a closed loop has nothing left to end
        loop.call_soon_threadsafe(call)


def _end(loop: asyncio.AbstractEventLoop, ended: asyncio.Event, thread: threading.Thread) -> None:
    _call_soon(loop, ended.set)
    if threading.current_thread() is not thread:  # where garbage is collected
        thread.join()


def _run_loop(loop: asyncio.AbstractEventLoop, engine: AsyncEngine, ended: asyncio.Event) -> None:
    loop.run_until_complete(_until_ended(engine, ended))
    loop.close()


async def _until_ended(engine: AsyncEngine, ended: asyncio.Event) -> None:
    await ended.wait()
    await engine.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others)


class RequestStream:
    """One open request. Iterate its deltas, then read `result`; use it as a context manager, or call `close`.

    The request ends, too, when nobody has the stream any more.
    """

    def __init__(self, stream: AsyncStream, thread: EngineThread) -> None:
        """Made on the engine's loop."""
        self._thread = thread
        self._deltas: SimpleQueue[ChoiceDelta | None] = SimpleQueue()
        self._whole: Future[RequestOutput] = Future()
        self._reading = asyncio.create_task(_read(stream, self._deltas, self._whole))
        self._abort = thread.call_soon(stream.close, self)
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
        """End the request; idempotent. Garbage's, which any thread may collect amid a step, ends soon after."""
        self._abort()
        if self._thread.may_wait:
            wait([self._whole])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _read(stream: AsyncStream, deltas: SimpleQueue[ChoiceDelta | None], whole: Future[RequestOutput]) -> None:
    """Pass on what comes to a `RequestStream`, without keeping it from being collected."""
    try:
        async for delta in stream:
            deltas.put(delta)
        whole.set_result(await stream.result())
    except RealizarError as error:
        whole.set_exception(error)
    finally:
        deltas.put(None)
