"""`Questions` of one kind that an engine has not answered yet, and all kinds together as `EngineQuestions`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

from realizar.backends.base import Transfer
from realizar.engine.core.metrics import EngineStats
from realizar.engine.process.messages import (
    AuditAnswer,
    Command,
    Event,
    Sleep,
    StatsAnswer,
    TransferAnswer,
    Wake,
    restore_error,
)
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


class EngineQuestions:
    """All that is asked of an engine beside requests. Attributes: stats, audits, transfers: by kind."""

    def __init__(self) -> None:
        self.stats: Questions[EngineStats] = Questions()
        self.audits: Questions[str | None] = Questions()
        self.transfers: Questions[TransferAnswer] = Questions()

    async def transfer(self, command: type[Sleep | Wake], send: Callable[[Command], None]) -> Transfer:
        """Ask for a transfer. Raises what the engine refuses it with."""
        ticket, answer = self.transfers.ask()
        send(command(ticket))
        given = await answer
        if given.transfer is None:
            raise RealizarError("the engine gave no reason") if given.error is None else restore_error(given.error)
        return given.transfer

    def answer(self, event: Event) -> None:
        """Resolve a question with an event that answers one; others pass."""
        if isinstance(event, StatsAnswer):
            self.stats.answer(event.ticket, event.stats)
        elif isinstance(event, AuditAnswer):
            self.audits.answer(event.ticket, event.fault)
        elif isinstance(event, TransferAnswer):
            self.transfers.answer(event.ticket, event)

    def fail(self, error: RealizarError) -> None:
        """End all open questions with an error."""
        self.stats.fail(error)
        self.audits.fail(error)
        self.transfers.fail(error)
