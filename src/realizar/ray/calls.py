"""`EngineCalls`: the requests of one replica's engine. Each is a call of a front, and gets its own events alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from realizar.engine.clients.async_engine import AsyncEngine
from realizar.engine.clients.async_link import EngineLink
from realizar.engine.clients.async_stream import AsyncStream
from realizar.engine.process.messages import (
    Accepted,
    Loading,
    Outputs,
    PromptRead,
    Ready,
    Refused,
    RequestsLost,
    record_error,
)
from realizar.errors import RealizarError
from realizar.ray.messages import CallEvent, Lost, Reports
from realizar.ray.reported_keys import HeldBlocks, WatchedLink
from realizar.request import Request
from realizar.server.processes.routed_link import NoText, RoutedLink
from realizar.server.processes.split import DeltaSplitter
from realizar.step_deltas import StepDeltas

_ENCODER = msgspec.msgpack.Encoder()


@dataclass(slots=True, eq=False)
class _Call:
    """Events that were not taken yet. Attributes: news: set while there are some, or `has_ended`."""

    events: list[CallEvent] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    has_ended: bool = False
    stream: AsyncStream | None = None

    def put(self, event: CallEvent) -> None:
        if not self.has_ended:
            self.events.append(event)
            self.news.set()

    def end(self) -> None:
        self.has_ended = True
        self.news.set()


class EngineCalls:
    """Owns an engine, and gives every call the events of its request. It is the `Audience` of the engine's link.

    Args:
        name: of the replica.
        link: to the engine.
        max_queued: choices that may wait; None takes the engine's own limit.
        clock: that of the engine's times.
    """

    def __init__(
        self, name: str, link: EngineLink, max_queued: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name, self._clock = name, clock
        self._held = HeldBlocks()
        self._calls: dict[str, _Call] = {}
        self._splitter: DeltaSplitter[_Call] = DeltaSplitter(self._calls.get)
        self.engine = AsyncEngine(
            RoutedLink(WatchedLink(link, self._held), self), lambda _: NoText(), max_queued=max_queued
        )

    async def run(self, request: Request) -> AsyncGenerator[bytes]:
        """Run a request: `Reports` as msgpack, until it has ended. It is aborted where the consumer stops before."""
        request_id = request.request_id
        if request_id in self._calls:
            yield self._reports([Refused(request_id, record_error(RealizarError(f"{request_id!r} is in use")))])
            return
        call = self._calls[request_id] = _Call()
        submitting = asyncio.create_task(self._submit(call, replace(request, arrival_s=self._clock())))
        try:
            while not (call.has_ended and not call.events):
                await call.news.wait()
                call.news.clear()
                events, call.events = call.events, []
                if events:
                    yield self._reports(events)
        finally:
            del self._calls[request_id]
            self._splitter.forget(request_id)
            submitting.cancel()
            if call.stream is not None:
                call.stream.close()

    def report(self) -> dict[str, Any]:
        """Keys of the prefix cache, as Ray Serve's routing statistics; one incarnation for each engine."""
        return self._held.report(self.engine.num_restarts)

    def take_deltas(self, deltas: StepDeltas) -> None:
        """See `Audience`."""
        for call, share in self._splitter.split(deltas):
            call.put(Outputs(share))

    def accepted(self, event: Accepted) -> None:
        """See `Audience`."""
        self._put(event)

    def prompt_read(self, event: PromptRead) -> None:
        """See `Audience`."""
        self._put(event)

    def state_changed(self, event: Ready | Loading) -> None:
        """See `Audience`. Fronts ask, and calls don't depend on it."""

    def requests_lost(self, event: RequestsLost) -> None:
        """See `Audience`: one engine never loses some of its requests alone."""

    def engine_lost(self, error: RealizarError, *, restarting: bool) -> None:
        """See `Audience`."""
        self._splitter.clear()
        for call in self._calls.values():
            call.put(Lost(record_error(error)))
            call.end()

    def engine_blocked(self, reason: str) -> None:
        """See `Audience`. The engine refuses requests with the reason."""

    async def _submit(self, call: _Call, request: Request) -> None:
        """Queue a request. The engine's own `Accepted` has been put when this ends."""
        try:
            call.stream = await self.engine.submit(request)
        except RealizarError as error:
            call.put(Refused(request.request_id, record_error(error)))
            call.end()
        else:
            call.stream.when_done(call.end)

    def _put(self, event: Accepted | PromptRead) -> None:
        call = self._calls.get(event.request_id)
        if call is not None:
            call.put(event)

    def _reports(self, events: list[CallEvent]) -> bytes:
        return _ENCODER.encode(Reports(self.name, self._clock(), tuple(events)))
