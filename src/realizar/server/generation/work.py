"""`WorkPool`: computing for clients off the event loop, in lanes by size, one client after the other in each.

Parsing, rendering and tokenizing go through here, so that a short text waits for no long one, no client for the many
texts of another, and what nobody waits for any more is not begun.
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from realizar.errors import RealizarError
from realizar.server.errors import ApiError
from realizar.server.http.memory_return import return_memory

T = TypeVar("T")

LARGE_BYTES = 64 << 10
_SMALL_THREADS = 2
_LARGE_THREADS = 1  # also bounds the memory: one large text at a time is taken apart


class WorkCancelledError(Exception):
    """Nobody waits for the result any more."""


class Stop:
    """Tells a piece of work on a thread whether it is still wanted."""

    def __init__(self) -> None:
        self._wanted = True

    def set(self) -> None:
        """The work is not wanted any more."""
        self._wanted = False

    def check(self) -> None:
        """For the work, to call between its parts.

        Raises:
            WorkCancelledError: it is not wanted any more.
        """
        if not self._wanted:
            raise WorkCancelledError


class WorkPool:
    """Two lanes: one for what is small, one for what is large. Belongs to the event loop that first uses it."""

    def __init__(self) -> None:
        self._small = _Lane(_SMALL_THREADS, "small-work")
        self._large = _Lane(_LARGE_THREADS, "large-work", after=return_memory)

    async def run(self, client: str, size_bytes: int, function: Callable[[Stop], T]) -> T:
        """The result of `function` on a thread. If the caller is cancelled it is not begun, or told to stop.

        Args:
            client: whose turn it takes.
            size_bytes: of what it works on; chooses the lane.
        """
        lane = self._small if size_bytes <= LARGE_BYTES else self._large
        return await lane.run(client, function)


class _Job(Generic[T]):
    """A function that waits for its turn, and the future of its result."""

    def __init__(self, function: Callable[[Stop], T], loop: asyncio.AbstractEventLoop) -> None:
        self.function, self.loop = function, loop
        self.stop = Stop()
        self.result: asyncio.Future[T] = loop.create_future()

    def run(self) -> T:
        self.stop.check()
        return self.function(self.stop)

    def end(self, done: Future[T]) -> None:
        if self.result.done():
            return
        error = done.exception()
        if error is None:
            self.result.set_result(done.result())
            return
        if isinstance(error, ApiError | RealizarError):  # foreseen: nobody reads where it came from
            error.__traceback__ = error.__context__ = None  # whose frames hold the text until the next collection
        self.result.set_exception(error)


class _Lane:
    """A few threads, and what waits for them by client: each client in turn, its own work in order."""

    def __init__(self, num_threads: int, name: str, after: Callable[[], None] = lambda: None) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_free = num_threads
        self._after = after
        self._waiting: OrderedDict[str, deque[_Job[object]]] = OrderedDict()

    async def run(self, client: str, function: Callable[[Stop], T]) -> T:
        job = _Job(function, asyncio.get_running_loop())
        self._waiting.setdefault(client, deque()).append(job)  # type: ignore[arg-type]
        self._start()
        try:
            return await job.result
        finally:
            if not job.result.done() or job.result.cancelled():
                job.stop.set()
                self._forget(client, job)  # type: ignore[arg-type]
            del job  # or an error, its traceback and this frame would hold each other

    def _forget(self, client: str, job: _Job[object]) -> None:
        queue = self._waiting.get(client)
        if queue is not None and job in queue:
            queue.remove(job)
            if not queue:
                del self._waiting[client]

    def _start(self) -> None:
        while self._num_free and self._waiting:
            client, queue = self._waiting.popitem(last=False)
            job = queue.popleft()
            if queue:
                self._waiting[client] = queue  # behind all others
            self._num_free -= 1
            running = self._threads.submit(self._work, job)
            running.add_done_callback(functools.partial(self._ended, job))

    def _work(self, job: _Job[object]) -> object:
        try:
            return job.run()
        finally:
            self._after()

    def _ended(self, job: _Job[object], done: Future[object]) -> None:
        """On the thread that did the work."""
        if not job.loop.is_closed():
            job.loop.call_soon_threadsafe(self._take_back, job, done)

    def _take_back(self, job: _Job[object], done: Future[object]) -> None:
        self._num_free += 1
        job.end(done)
        self._start()
