"""`Replica`: one of several engines behind an API, and the requests that it has. One engine follows another in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias

from realizar.engine.frontend.async_link import EngineLink
from realizar.engine.frontend.questions import Questions
from realizar.engine.process.messages import Abort, Command, EngineInfo, EngineLost, Event, Reply
from realizar.engine.stats import EngineStats
from realizar.errors import EngineDeadError, RealizarError
from realizar.replicas.routing import ReplicaLoad
from realizar.request import Request

ReplicaState: TypeAlias = Literal["starting", "ready", "draining", "down"]
"""`starting`: its engine loads, or is about to. `draining`: it ends its requests and gets no others. `down`: no engine
is being started for a while."""

_FIGURES_PATIENCE_S = 0.5
_ABORTED_S = 30.0  # for so long after an abort, an engine may still work on a request


@dataclass(slots=True)
class PlacedRequest:
    """An open request.

    Attributes:
        keys: of its prompt's blocks.
        pending_tokens: of its prompt, that it waits for as far as is known; 0 once something of it came.
        has_begun: something of it came.
        num_moves: replicas that died while they had it.
        was_accepted: its client knows that it is queued.
    """

    request: Request
    keys: tuple[bytes, ...]
    replica: Replica
    pending_tokens: int
    open_choices: set[int]
    has_begun: bool = False
    num_moves: int = 0
    was_accepted: bool = False


class Replica:
    """A place for an engine: its link's `LinkListener`.

    `new_link` makes a link to an engine that is not started yet; `report` gets every event but answers.

    Attributes:
        info: of the last engine that was ready.
        incarnation: of its engine, unique over all replicas; the owner sets it.
        num_reports: of the prefix cache, that the engine sent.
    """

    def __init__(self, name: str, new_link: Callable[[], EngineLink], report: Callable[[Replica, Event], None]) -> None:
        self.name, self._new_link, self._report = name, new_link, report
        self._link: EngineLink | None = None
        self._closing: asyncio.Task[None] | None = None
        self.state: ReplicaState = "starting"
        self.info: EngineInfo | None = None
        self.incarnation = self.num_reports = 0
        self.requests: dict[str, PlacedRequest] = {}
        self.asked = Questions(self.send)
        self._last_stats = self._earlier_stats = EngineStats()
        self._last_abort_s = -_ABORTED_S

    @property
    def is_alive(self) -> bool:
        return self.state in ("ready", "draining")

    @property
    def load(self) -> ReplicaLoad:
        pending = sum([each.pending_tokens for each in self.requests.values()])
        return ReplicaLoad(pending, sum([len(each.open_choices) for each in self.requests.values()]))

    @property
    def stats(self) -> EngineStats:
        """The figures of its engines, as they last said; counts go on over restarts."""
        return self._last_stats.plus(self._earlier_stats)

    async def start(self) -> None:
        self.state = "starting"
        self._link = self._new_link()
        await self._link.start(self)

    async def close(self, *, at_once: bool = False) -> None:
        """End the engine; idempotent. A close that was cancelled goes on, and the next one waits for it."""
        link, self._link = self._link, None
        if link is not None:
            self._closing = asyncio.create_task(link.close(at_once=at_once))
        if self._closing is not None:
            await asyncio.shield(self._closing)

    def send(self, command: Command) -> None:
        if isinstance(command, Abort):
            self._last_abort_s = time.monotonic()
        if self._link is not None:
            self._link.send(command)

    async def refresh(self) -> None:
        """Ask for figures; where the engine is busy or lost, those that it last gave stay."""
        with suppress(TimeoutError, RealizarError):
            self._last_stats = await self.asked.ask("stats", _FIGURES_PATIENCE_S)

    def count_end(self, *, restarting: bool) -> None:
        """Go on counting over the end of an engine; `restarting`: it ended by itself, and is replaced."""
        self._earlier_stats = self.stats.plus(EngineStats(num_restarts=int(restarting)))
        self._last_stats = EngineStats()
        self.asked.fail(EngineDeadError(f"replica {self.name} ended"))

    @property
    def may_be_to_blame(self) -> bool:
        return bool(self.requests) or time.monotonic() - self._last_abort_s < _ABORTED_S

    def handle(self, event: Event) -> None:
        if isinstance(event, Reply):
            self.asked.resolve(event)
            return
        if isinstance(event, EngineLost):
            self.state = "starting" if event.restarting else "down"
            self.count_end(restarting=event.restarting)
        self._report(self, event)
