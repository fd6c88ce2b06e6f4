"""Several streams of one request merged into one, and their admission to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from realizar.errors import QueueFullError

T = TypeVar("T")
_LONGEST_PAUSE_S = 1.0


class Admission:
    """Admits the parts of one request, `at_once` at a time, with retries while the queue is full.

    The request as a whole is refused only if its first part is refused.
    """

    def __init__(self, at_once: int) -> None:
        self.slots = asyncio.Semaphore(max(at_once, 1))
        self._any_in = False

    async def enter(self, submit: Callable[[], Awaitable[T]]) -> T:
        """Call `submit` until the queue accepts it, and return its result.

        Raises QueueFullError where the queue is full and no part has been accepted yet.
        """
        while True:
            try:
                entered = await submit()
            except QueueFullError as error:
                if not self._any_in:
                    raise
                await asyncio.sleep(min(error.retry_after_s, _LONGEST_PAUSE_S))
            else:
                self._any_in = True
                return entered


def merged(streams: Sequence[Callable[[], AsyncGenerator[T]]]) -> AsyncGenerator[T]:
    """Iterate the items of all streams as they arrive. The first error, or the consumer's end, ends all of them."""
    return streams[0]() if len(streams) == 1 else _merged(streams)


async def _merged(streams: Sequence[Callable[[], AsyncGenerator[T]]]) -> AsyncGenerator[T]:
    queue: asyncio.Queue[T | Exception | None] = asyncio.Queue(maxsize=2 * len(streams))  # None: one has ended

    async def run(make: Callable[[], AsyncGenerator[T]]) -> None:
        end: Exception | None = None
        try:
            async with aclosing(make()) as stream:
                async for item in stream:
                    await queue.put(item)
        except Exception as raised:  # noqa: BLE001 - raised again in the consumer
            end = raised
        await queue.put(end)

    tasks = [asyncio.ensure_future(run(make)) for make in streams]
    try:
        num_open = len(tasks)
        while num_open:
            came = await queue.get()
            if isinstance(came, Exception):
                raise came
            if came is None:
                num_open -= 1
            else:
                yield came
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
