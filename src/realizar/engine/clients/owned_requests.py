"""`OwnedRequests`: requests of several owners in one `AsyncEngine`, each of which gets the events of its own.

A `RoutedLink` shows them every event, and gives the engine no tokens; that counts the queue, suspects and restarts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from realizar.delta_shares import named_numbers, share_of
from realizar.engine.clients.async_engine import AsyncEngine
from realizar.engine.clients.async_link import EngineLink, LinkBetween
from realizar.engine.clients.async_stream import AsyncStream
from realizar.engine.process.messages import (
    Accepted,
    EngineBlocked,
    EngineLost,
    Event,
    Loading,
    Outputs,
    PromptRead,
    Ready,
    Refused,
    RequestsLost,
    record_error,
)
from realizar.errors import EngineDeadError, RealizarError
from realizar.request import Request
from realizar.step_deltas import StepDeltas

OwnedEvent: TypeAlias = Accepted | Refused | PromptRead | RequestsLost | Outputs
StateEvent: TypeAlias = Ready | Loading | EngineLost | EngineBlocked
_Owner = TypeVar("_Owner")


class DeltaSplitter(Generic[_Owner]):
    """Knows the owner of every choice of which something came. `owner_of` gives None for a request that is not open."""

    def __init__(self, owner_of: Callable[[str], _Owner | None]) -> None:
        self._owner_of = owner_of
        self._owners: dict[int, _Owner] = {}  # by the engine's number of the choice
        self._numbers: dict[str, list[int]] = {}  # by request id

    def __len__(self) -> int:
        return len(self._owners)

    def split(self, deltas: StepDeltas) -> list[tuple[_Owner, StepDeltas]]:
        """Each owner's share. Deltas of requests that are not open are left out."""
        for start in deltas.starts:
            owner = self._owner_of(start.request_id)
            if owner is not None:
                self._owners[start.number] = owner
                self._numbers.setdefault(start.request_id, []).append(start.number)
        shares: dict[_Owner, set[int]] = {}
        numbers = named_numbers(deltas)
        for number in numbers:
            owner = self._owners.get(number)
            if owner is not None:
                shares.setdefault(owner, set()).add(number)
        if [len(mine) for mine in shares.values()] == [len(numbers)]:  # all is one owner's
            return [(owner, deltas) for owner in shares]
        return [(owner, share_of(deltas, mine)) for owner, mine in shares.items()]

    def forget(self, request_id: str) -> None:
        for number in self._numbers.pop(request_id, ()):
            self._owners.pop(number, None)

    def clear(self) -> None:
        """Forget every request, since their engine is gone; another one gives numbers anew."""
        self._owners.clear()
        self._numbers.clear()


@dataclass(slots=True)
class _Open(Generic[_Owner]):
    """A request of an owner. `task` queues it; `stream` is there once it is queued."""

    owner: _Owner
    task: asyncio.Task[None] | None = None
    stream: AsyncStream | None = None


class OwnedRequests(Generic[_Owner]):
    """The open requests by id: `on_state` gets what concerns all, `on_end` an owner whose request ended or failed."""

    def __init__(
        self,
        deliver: Callable[[_Owner, OwnedEvent], None],
        on_state: Callable[[StateEvent], None],
        on_end: Callable[[_Owner], None] = lambda _: None,
    ) -> None:
        self._deliver, self._on_state, self._on_end = deliver, on_state, on_end
        self.engine: AsyncEngine | None = None
        self._open: dict[str, _Open[_Owner]] = {}
        self._splitter: DeltaSplitter[_Owner] = DeltaSplitter(self._owner_of)

    def __len__(self) -> int:
        return len(self._open)

    def owners(self) -> list[_Owner]:
        return [entry.owner for entry in self._open.values()]

    def add(self, owner: _Owner, request: Request) -> None:
        if request.request_id in self._open:
            error = RealizarError(f"request id {request.request_id!r} is in use")
            self._refuse(owner, request, error)
            return
        entry = self._open[request.request_id] = _Open(owner)
        entry.task = asyncio.create_task(self._submit(entry, request))

    def abort(self, owner: _Owner, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it; that of another owner passes."""
        entry = self._open.get(request_id)
        if entry is None or entry.owner != owner:
            return
        if choice is not None:
            if self.engine is not None:
                self.engine.end_choice(request_id, choice)
            return
        self._forget(request_id)
        if entry.stream is not None:
            entry.stream.close()
        elif entry.task is not None:
            entry.task.cancel()

    def abandon(self, owner: _Owner) -> None:
        for request_id, entry in list(self._open.items()):
            if entry.owner == owner:
                self.abort(owner, request_id)

    def take(self, event: Event) -> None:
        match event:
            case Outputs(deltas):
                for owner, share in self._splitter.split(deltas):
                    self._deliver(owner, Outputs(share))
            case Accepted(request_id) | PromptRead(request_id):
                if (entry := self._open.get(request_id)) is not None:
                    self._deliver(entry.owner, event)
            case RequestsLost(request_ids, error):  # the engine above knows whom to blame
                shares: dict[_Owner, list[str]] = {}
                for request_id in request_ids:
                    if (entry := self._open.get(request_id)) is not None:
                        shares.setdefault(entry.owner, []).append(request_id)
                for owner, lost in shares.items():
                    self._deliver(owner, RequestsLost(tuple(lost), error))
            case Ready() | Loading() | EngineLost() | EngineBlocked():
                if isinstance(event, EngineLost):
                    self._splitter.clear()
                self._on_state(event)

    async def _submit(self, entry: _Open[_Owner], request: Request) -> None:
        """Queue a request. The engine's own `Accepted` has gone to its owner when this ends; a refusal goes here."""
        request_id = request.request_id
        try:
            if self.engine is None:
                raise EngineDeadError("the engine was not started")
            entry.stream = await self.engine.submit(request)
        except RealizarError as error:
            self._forget(request_id)
            self._refuse(entry.owner, request, error)
        except BaseException:
            self._forget(request_id)
            raise
        else:
            entry.stream.when_done(lambda: self._end(request_id, entry))

    def _refuse(self, owner: _Owner, request: Request, error: RealizarError) -> None:
        self._deliver(owner, Refused(request.request_id, record_error(error)))
        self._on_end(owner)

    def _end(self, request_id: str, entry: _Open[_Owner]) -> None:
        if self._open.get(request_id) is entry:  # else it was aborted, and another may have its id
            self._forget(request_id)
        self._on_end(entry.owner)

    def _forget(self, request_id: str) -> None:
        self._open.pop(request_id, None)
        self._splitter.forget(request_id)

    def _owner_of(self, request_id: str) -> _Owner | None:
        entry = self._open.get(request_id)
        return None if entry is None else entry.owner


class NoText:
    """The text of a choice whose tokens are elsewhere, as a `GrowingText`."""

    may_stop = False
    stop_string = None
    marks = ()

    def add(self, token_ids: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


class RoutedLink(LinkBetween):
    """An `EngineLink` between `link` and the engine of owned requests; `take` gets every event before that does."""

    def __init__(self, link: EngineLink, take: Callable[[Event], None]) -> None:
        super().__init__(link)
        self._take = take

    def handle(self, event: Event) -> None:
        self._take(event)
        if isinstance(event, Outputs):  # what counts for all together: starts, ends and failures
            deltas = event.deltas
            whole = StepDeltas(deltas.produced_s, starts=deltas.starts, ends=deltas.ends, failures=deltas.failures)
            super().handle(Outputs(whole))
        elif not isinstance(event, PromptRead):
            super().handle(event)
