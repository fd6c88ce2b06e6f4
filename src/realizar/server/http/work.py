"""`WorkPool` runs computing for clients off the event loop, in lanes by size, in which clients take turns.

Parsing, rendering and tokenizing run here, so that a short text does not wait for a long one, and a client does not
wait for the many texts of another. Work that nobody waits for any more is not begun.
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Generic, TypeVar

from realizar.errors import RealizarError
from realizar.server.errors import ApiError
from realizar.server.http.memory_return import return_memory

T = TypeVar("T")

LARGE_BYTES = 64 << 10
_SMALL_THREADS = 2
_FETCHING_THREADS = 4
_LARGE_THREADS = 1  # also bounds the memory: one large text is parsed at a time


class WorkCancelledError(Exception):
    """The work was cancelled, as nobody waits for its result any more."""


class Stop:
    """A flag by which work on a thread learns that it is not wanted any more."""

    def __init__(self) -> None:
        self._wanted = True

    def set(self) -> None:
        self._wanted = False

    def check(self) -> None:
        """The work calls this between its parts. It raises WorkCancelledError if the work is not wanted any more."""
        if not self._wanted:
            raise WorkCancelledError


class WorkPool:
    """Two lanes, for small and for large work, and one that waits for other servers.

    The pool belongs to the event loop that first uses it.
    """

    def __init__(self) -> None:
        self._small = Lane(_SMALL_THREADS, "small-work")
        self._large = Lane(_LARGE_THREADS, "large-work", after=return_memory)
        self.fetches = Lane(_FETCHING_THREADS, "fetches")

    async def run(self, client: str, size_bytes: int, function: Callable[[Stop], T]) -> T:
        """Run `function` on a thread and return its result. If the caller is cancelled, it is stopped or not begun.

        The work takes a turn of `client`. `size_bytes`, the size of its input, chooses the lane.
        """
        lane = self._small if size_bytes <= LARGE_BYTES else self._large
        return await lane.run(client, function)


class _Job(Generic[T]):
    def __init__(self, function: Callable[[Stop], T], loop: asyncio.AbstractEventLoop) -> None:
        self.function, self.loop, self.context = function, loop, copy_context()
        self.stop = Stop()
        self.result: asyncio.Future[T] = loop.create_future()

    def run(self) -> T:
        self.stop.check()
        return self.context.run(self.function, self.stop)

    def end(self, done: Future[T]) -> None:
        if self.result.done():
            return
        error = done.exception()
        if error is None:
            self.result.set_result(done.result())
            return
        if isinstance(error, ApiError | RealizarError):  # an expected error, whose traceback nobody reads
            error.__traceback__ = error.__context__ = None  # its frames would hold the text until the next collection
        self.result.set_exception(error)


class Lane:
    """A few threads and the work that waits for them: clients take turns, and each client's work runs in order."""

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
            del job  # otherwise an error, its traceback and this frame would keep each other alive

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
        """Hand the result to the event loop. This runs on the thread that did the work."""
        if not job.loop.is_closed():
            job.loop.call_soon_threadsafe(self._take_back, job, done)

    def _take_back(self, job: _Job[object], done: Future[object]) -> None:
        self._num_free += 1
        job.end(done)
        self._start()
