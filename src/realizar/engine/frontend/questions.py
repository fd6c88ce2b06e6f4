"""`Questions` to another process that it has not answered yet, and `send_reply` for the other side."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from realizar.engine.process.messages import Ask, Question, Reply
from realizar.errors import RealizarError
from realizar.ipc.error_records import record_error, restore_error

_NUMBERS = itertools.count()  # unique in this process, so that a reply may be shown to several


class Questions:
    """Open questions, by number."""

    def __init__(self, send: Callable[[Ask], None]) -> None:
        self._send = send
        self._open: dict[int, asyncio.Future[Any]] = {}

    async def ask(self, what: Question, patience_s: float | None = None) -> Any:
        """Wait for the reply. TimeoutError: it is late. RealizarError: it is refused, or the other side is gone."""
        number = next(_NUMBERS)
        reply = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(Ask(number, what))
            async with asyncio.timeout(patience_s):
                return await reply
        finally:
            del self._open[number]

    def resolve(self, reply: Reply[Any]) -> None:
        """Resolve a question; a reply that nobody waits for is ignored."""
        waiting = self._open.get(reply.number)
        if waiting is None or waiting.done():
            return
        if reply.error is None:
            waiting.set_result(reply.value)
        else:
            waiting.set_exception(restore_error(reply.error))

    def fail(self, error: RealizarError) -> None:
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(error)


async def send_reply(ask: Ask, value: Awaitable[Any], send: Callable[[Reply[Any]], None]) -> None:
    """Reply with what is awaited, or with its error."""
    try:
        reply = Reply(ask.number, await value)
    except Exception as error:  # noqa: BLE001 - whoever asked waits, and must learn of any error
        reply = Reply(ask.number, error=record_error(error))
    send(reply)
