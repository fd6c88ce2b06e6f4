"""`Questions`: the questions that an engine has not answered yet."""

from __future__ import annotations

import asyncio
import itertools
from typing import Generic, TypeVar

from realizar.errors import RealizarError

_Answer = TypeVar("_Answer")


class Questions(Generic[_Answer]):
    """Open questions of one kind, by ticket."""

    def __init__(self) -> None:
        self._tickets = itertools.count()
        self._asked: dict[int, asyncio.Future[_Answer]] = {}

    def ask(self) -> tuple[int, asyncio.Future[_Answer]]:
        """Open a question: a ticket to send, and a future of the answer."""
        ticket = next(self._tickets)
        answer = self._asked[ticket] = asyncio.get_running_loop().create_future()
        return ticket, answer

    def answer(self, ticket: int, answer: _Answer) -> None:
        """Resolve a question with the engine's answer; an unknown ticket is ignored."""
        waiting = self._asked.pop(ticket, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def fail(self, error: RealizarError) -> None:
        """End all open questions with an error."""
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(error)
        self._asked.clear()
