"""`Questions` to another process that it has not answered yet, and `send_answer` for those who answer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from realizar.engine.process.messages import Answer, Ask, Question, record_error, restore_error
from realizar.errors import RealizarError

_NUMBERS = itertools.count()  # unique in this process, so that an answer may be shown to several


class Questions:
    """Open questions, by number."""

    def __init__(self, send: Callable[[Ask], None]) -> None:
        self._send = send
        self._open: dict[int, asyncio.Future[Any]] = {}

    async def ask(self, what: Question, patience_s: float | None = None) -> Any:
        """Wait for the answer. TimeoutError: it is late. RealizarError: it is refused, or the other side is gone."""
        number = next(_NUMBERS)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(Ask(number, what))
            async with asyncio.timeout(patience_s):
                return await answer
        finally:
            del self._open[number]

    def answer(self, answer: Answer[Any]) -> None:
        """Resolve a question; an answer that nobody waits for is ignored."""
        waiting = self._open.get(answer.number)
        if waiting is None or waiting.done():
            return
        if answer.error is None:
            waiting.set_result(answer.value)
        else:
            waiting.set_exception(restore_error(answer.error))

    def fail(self, error: RealizarError) -> None:
        for waiting in self._open.values():
            if not waiting.done():
                waiting.set_exception(error)


async def send_answer(ask: Ask, value: Awaitable[Any], send: Callable[[Answer[Any]], None]) -> None:
    """Answer with what is awaited, or with its error."""
    try:
        answer = Answer(ask.number, await value)
    except Exception as error:  # noqa: BLE001 - whoever asked waits, and must learn of any error
        answer = Answer(ask.number, error=record_error(error))
    send(answer)
