"""`Tasks`: work on the event loop that nobody waits for, kept until it is done. `Changes` wakes those who wait."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import Context
from typing import Any


class Tasks:
    """The tasks of one owner. One event loop uses it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None], context: Context | None = None) -> asyncio.Task[None]:
        """Start work, in a copy of the current context where none is given."""
        task = asyncio.create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def ended(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def cancel(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Changes:
    """Wakes everybody who waits, each time that something has changed."""

    def __init__(self) -> None:
        self.next = asyncio.Event()

    def note(self) -> None:
        changed, self.next = self.next, asyncio.Event()
        changed.set()

    async def wait(self) -> None:
        await self.next.wait()
