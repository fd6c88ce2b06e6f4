"""`Questions` of one kind that an engine has not answered yet, and all kinds together as `EngineQuestions`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

from realizar.backends.base import Transfer
from realizar.engine.core.metrics import EngineStats
from realizar.engine.process.messages import (
    AskAudit,
    AskStats,
    AuditAnswer,
    CacheCleared,
    ClearCache,
    Command,
    Event,
    Sleep,
    StatsAnswer,
    TransferAnswer,
    Wake,
    restore_error,
)
from realizar.errors import EngineDeadError, RealizarError

_Answer = TypeVar("_Answer")
_STATS_PATIENCE_S = 1.0


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
    """All that is asked of an engine beside requests. Args: send: passes a command on to the engine."""

    def __init__(self, send: Callable[[Command], None]) -> None:
        self._send = send
        self._stats: Questions[EngineStats] = Questions()
        self._audits: Questions[str | None] = Questions()
        self._transfers: Questions[TransferAnswer] = Questions()
        self._clearings: Questions[CacheCleared] = Questions()

    async def stats(self) -> EngineStats | None:
        """The engine's figures; None where it is lost, or a long step delays its answer."""
        ticket, answer = self._stats.ask()
        self._send(AskStats(ticket))
        with suppress(TimeoutError, EngineDeadError):
            return await asyncio.wait_for(answer, _STATS_PATIENCE_S)
        return None

    async def audit(self) -> str | None:
        """The finding of the engine's audit, or None."""
        ticket, answer = self._audits.ask()
        self._send(AskAudit(ticket))
        return await answer

    async def clear_cache(self) -> None:
        """Have the prefix cache forget all that it holds. Raises what the engine refuses it with."""
        ticket, answer = self._clearings.ask()
        self._send(ClearCache(ticket))
        given = await answer
        if given.error is not None:
            raise restore_error(given.error)

    async def transfer(self, command: type[Sleep | Wake]) -> Transfer:
        """Ask for a transfer. Raises what the engine refuses it with."""
        ticket, answer = self._transfers.ask()
        self._send(command(ticket))
        given = await answer
        if given.transfer is None:
            raise RealizarError("the engine gave no reason") if given.error is None else restore_error(given.error)
        return given.transfer

    def answer(self, event: Event) -> None:
        """Resolve a question with an event that answers one; others pass."""
        if isinstance(event, StatsAnswer):
            self._stats.answer(event.ticket, event.stats)
        elif isinstance(event, AuditAnswer):
            self._audits.answer(event.ticket, event.fault)
        elif isinstance(event, TransferAnswer):
            self._transfers.answer(event.ticket, event)
        elif isinstance(event, CacheCleared):
            self._clearings.answer(event.ticket, event)

    def fail(self, error: RealizarError) -> None:
        """End all open questions with an error."""
        for each in (self._stats, self._audits, self._transfers, self._clearings):
            each.fail(error)
