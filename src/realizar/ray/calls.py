"""`EngineCalls`: the requests of one replica's engine. Each is a call of a front, and gets its own events alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from realizar.engine.frontend.async_link import EngineLink
from realizar.engine.frontend.shared_engine import OwnedEvent, SharedEngine, StateEvent
from realizar.engine.process.messages import CachedKeys, EngineLost, Ready, RequestsLost, WatchKeys
from realizar.ray.reported_keys import HeldBlocks
from realizar.request import Request

_ENCODER = msgspec.msgpack.Encoder()


class Reports(msgspec.Struct, frozen=True):
    """The events of one request since the last reports, from an engine's `replica` to a front.

    `sent_s` is of the replica's `time.monotonic`, the clock of all times in `events`; nothing follows `RequestsLost`.
    """

    replica: str
    sent_s: float
    events: tuple[OwnedEvent, ...]


@dataclass(slots=True, eq=False)
class _Call:
    """Events that were not taken yet; `news` is set while there are some, or `has_ended`."""

    events: list[OwnedEvent] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    has_ended: bool = False

    def put(self, event: OwnedEvent) -> None:
        if not self.has_ended:
            self.events.append(event)
            self.news.set()

    def end(self) -> None:
        self.has_ended = True
        self.news.set()


class EngineCalls:
    """Owns an engine, and gives every call the events of its request; `name` is the replica's.

    `max_queued` choices may wait; None takes the engine's own limit. `clock` is that of the engine's times.
    """

    def __init__(
        self, name: str, link: EngineLink, max_queued: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name, self._link, self._clock = name, link, clock
        self._held = HeldBlocks()
        self.engine: SharedEngine[_Call] = SharedEngine(
            link, _Call.put, self._note_state, _Call.end, max_queued=max_queued
        )

    async def run(self, request: Request) -> AsyncGenerator[bytes]:
        """Run a request: `Reports` as msgpack, until it has ended. It is aborted where the consumer stops before."""
        call = _Call()
        self.engine.add(call, replace(request, arrival_s=self._clock()))
        try:
            while not (call.has_ended and not call.events):
                await call.news.wait()
                call.news.clear()
                events, call.events = call.events, []
                if events:
                    yield _ENCODER.encode(Reports(self.name, self._clock(), tuple(events)))
        finally:
            self.engine.abort(call, request.request_id)

    def report(self) -> dict[str, Any]:
        """Keys of the prefix cache, as Ray Serve's routing statistics; one incarnation for each engine."""
        return self._held.report(self.engine.num_restarts)

    def _note_state(self, event: StateEvent) -> None:
        """Follow the engine's keys, and end all calls at its end. Fronts ask for the state."""
        if isinstance(event, CachedKeys):
            self._held.take(event.changes)
        elif isinstance(event, Ready) and event.info.cached_block_tokens:
            self._link.send(WatchKeys())
        elif isinstance(event, EngineLost):
            self._held.clear()
            for call in self.engine.owners:
                call.put(RequestsLost((), event.error))
                call.end()
