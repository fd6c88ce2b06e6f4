"""`SharedEngine`: an `AsyncEngine` whose requests have owners elsewhere, each of which gets the events of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from realizar.engine.frontend.async_engine import AsyncEngine
from realizar.engine.frontend.async_link import EngineLink
from realizar.engine.frontend.async_stream import AsyncStream
from realizar.engine.frontend.open_table import OpenTable
from realizar.engine.process.messages import (
    Accepted,
    CachedKeys,
    EngineBlocked,
    EngineLost,
    Event,
    Loading,
    Outputs,
    PromptRead,
    Ready,
    Refused,
    RequestsLost,
)
from realizar.errors import RealizarError
from realizar.ipc.error_records import record_error
from realizar.request import Request
from realizar.step_deltas import StepDeltas

OwnedEvent: TypeAlias = Accepted | Refused | PromptRead | RequestsLost | Outputs
StateEvent: TypeAlias = Ready | Loading | EngineLost | EngineBlocked | CachedKeys
_Owner = TypeVar("_Owner")


@dataclass(slots=True)
class _Open(Generic[_Owner]):
    """A request of an owner. `task` queues it; `stream` is there once it is queued."""

    owner: _Owner
    task: asyncio.Task[None] | None = None
    stream: AsyncStream | None = None


class SharedEngine(AsyncEngine, Generic[_Owner]):
    """It makes no text, and counts queue, suspects and restarts over all owners.

    Args:
        deliver: gives an owner an event of its requests.
        on_state: gets what concerns all.
        on_end: gets an owner of whom a request ended or failed.
        max_queued: as of `AsyncEngine`.
    """

    def __init__(
        self,
        link: EngineLink,
        deliver: Callable[[_Owner, OwnedEvent], None],
        on_state: Callable[[StateEvent], None],
        on_end: Callable[[_Owner], None] = lambda _: None,
        *,
        max_queued: int | None = None,
    ) -> None:
        super().__init__(link, lambda _: NoText(), max_queued=max_queued)
        self._deliver, self._on_state, self._on_end = deliver, on_state, on_end
        self._owned: OpenTable[_Open[_Owner]] = OpenTable()

    @property
    def owners(self) -> list[_Owner]:
        """Of all open requests."""
        return [entry.owner for entry in self._owned.values()]

    def add(self, owner: _Owner, request: Request) -> None:
        if request.request_id in self._owned:
            self._refuse_owner(owner, request, RealizarError(f"request id {request.request_id!r} is in use"))
            return
        entry = self._owned[request.request_id] = _Open(owner)
        entry.task = asyncio.create_task(self._run(entry, request))

    def abort(self, owner: _Owner, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it; that of another owner passes."""
        entry = self._owned.get(request_id)
        if entry is None or entry.owner != owner:
            return
        if choice is not None:
            self.end_choice(request_id, choice)
            return
        self._owned.forget(request_id)
        if entry.stream is not None:
            entry.stream.close()
        elif entry.task is not None:
            entry.task.cancel()

    def abandon(self, owner: _Owner) -> None:
        for request_id in list(self._owned):
            self.abort(owner, request_id)

    def handle(self, event: Event) -> None:
        match event:
            case Outputs(deltas):
                for owner, share in self._owned.split(deltas, lambda entry: entry.owner):
                    self._deliver(owner, Outputs(share))
                # what counts for all together
                whole = StepDeltas(deltas.produced_s, starts=deltas.starts, ends=deltas.ends, failures=deltas.failures)
                event = Outputs(whole)
            case Accepted(request_id) | PromptRead(request_id):
                if (entry := self._owned.get(request_id)) is not None:
                    self._deliver(entry.owner, event)
                if isinstance(event, PromptRead):
                    return
            case RequestsLost(request_ids, error):  # the engine here knows whom to blame
                shares: dict[_Owner, list[str]] = {}
                for request_id in request_ids:
                    if (entry := self._owned.get(request_id)) is not None:
                        shares.setdefault(entry.owner, []).append(request_id)
                for owner, lost in shares.items():
                    self._deliver(owner, RequestsLost(tuple(lost), error))
            case Ready() | Loading() | EngineLost() | EngineBlocked() | CachedKeys():
                if isinstance(event, EngineLost):
                    self._owned.forget_numbers()
                self._on_state(event)
        super().handle(event)

    async def _run(self, entry: _Open[_Owner], request: Request) -> None:
        """Queue a request. The engine's own `Accepted` has gone to its owner when this ends; a refusal goes here."""
        try:
            entry.stream = await self.submit(request)
        except RealizarError as error:
            self._owned.forget(request.request_id)
            self._refuse_owner(entry.owner, request, error)
        except BaseException:
            self._owned.forget(request.request_id)
            raise
        else:
            entry.stream.when_done(lambda: self._end(request.request_id, entry))

    def _refuse_owner(self, owner: _Owner, request: Request, error: RealizarError) -> None:
        self._deliver(owner, Refused(request.request_id, record_error(error)))
        self._on_end(owner)

    def _end(self, request_id: str, entry: _Open[_Owner]) -> None:
        if self._owned.get(request_id) is entry:  # else it was aborted, and another may have its id
            self._owned.forget(request_id)
        self._on_end(entry.owner)


class NoText:
    """The text of a choice whose tokens are elsewhere, as a `GrowingText`."""

    may_stop = False
    stop_string = None
    marks = ()

    def add(self, token_ids: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""
