"""`ServeLink`: the link of a front's `AsyncEngine`, behind which are the engines of all replicas of a deployment."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from realizar.engine.delta_shares import renumbered
from realizar.engine.frontend.async_link import LinkListener
from realizar.engine.frontend.open_table import OpenTable
from realizar.engine.frontend.questions import send_reply
from realizar.engine.frontend.tasks import Tasks
from realizar.engine.process.child import growing_pause_s
from realizar.engine.process.messages import (
    Abort,
    Accepted,
    Add,
    Ask,
    Command,
    EngineInfo,
    Outputs,
    PromptRead,
    Question,
    Ready,
    Refused,
    RequestsLost,
)
from realizar.engine.stats import EngineStats
from realizar.errors import EngineDeadError, EngineUnavailableError, InvalidRequestError, RealizarError
from realizar.ipc.error_records import record_error
from realizar.ray.calls import Reports
from realizar.ray.reported_keys import RouteWish, wish_of
from realizar.request import Request
from realizar.step_deltas import StepDeltas

_LOG = logging.getLogger(__name__)
_ENCODER = msgspec.msgpack.Encoder()
_REPORTS = msgspec.msgpack.Decoder(Reports)
_STATS_PATIENCE_S = 0.8
_MAX_SENDS = 4  # of a request that no engine has begun
_MAX_LOSSES = 2  # of replicas that had queued it: the second one may have died of it
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


class Engines:
    """The engines of all replicas, through `handle`, the deployment's, whose type is Ray's."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._runs = handle.options(method_name="run", stream=True)

    async def run(self, request: bytes, wish: RouteWish) -> AsyncGenerator[bytes]:
        """Have a replica run a request, msgpack as the `Reports`. Closing the generator aborts the request."""
        parts = self._runs.remote(request, wish)
        try:
            async for part in parts:
                yield part
        finally:
            parts.cancel()

    async def info(self) -> EngineInfo:
        """Facts of an engine, once a replica has one."""
        info: EngineInfo = await self._handle.info.remote()
        return info

    async def stats(self) -> Mapping[str, EngineStats]:
        """Figures by the names of replicas. Those that don't answer in time are left out."""
        answers = await self._handle.broadcast("stats").results_async(timeout_s=_STATS_PATIENCE_S)
        return dict(answer for answer in answers if isinstance(answer, tuple))

    async def clear_caches(self) -> None:
        """Have the prefix cache of every engine forget what it holds."""
        await self._handle.broadcast("clear_cache").results_async()


@dataclass(slots=True)
class _Call:
    """A request on its way through a replica.

    Attributes:
        wish: of the present replica's try.
        num_queued: replicas that have queued it.
        begun: a step had it, so that no other replica can take over. done: its end has come.
        closed: nobody waits for it any more.
        replica: the last that had it.
        ended: indices of choices that have ended.
    """

    request: Request
    wish: RouteWish | None = None
    num_queued: int = 0
    begun: bool = False
    done: bool = False
    replica: str | None = None
    ended: set[int] = field(default_factory=set)
    closed: bool = False
    task: asyncio.Task[None] | None = None

    @property
    def accepted(self) -> bool:
        """A replica has queued it, which the client knows."""
        return self.num_queued > 0

    def close(self) -> None:
        self.closed = True
        if self.task is not None:
            self.task.cancel()


class ServeLink:
    """An `EngineLink` to many engines. A request that its replica loses goes to another one, if no step had it.

    There may be `max_replicas` engines; together they run so many times what one runs. `figures` are those of the
    engines as they were last asked for.
    """

    def __init__(self, engines: Engines, max_replicas: int) -> None:
        self._engines, self._max_replicas = engines, max_replicas
        self._listener: LinkListener | None = None
        self._calls: OpenTable[_Call] = OpenTable()
        self._tasks = Tasks()
        self._serials = itertools.count(1)
        self._prefix = secrets.token_hex(8)  # ids of requests are unique over all fronts
        self._block_tokens = 0
        self.figures = EngineFigures()

    async def start(self, listener: LinkListener) -> None:
        self._listener = listener
        self._start(self._wait_ready(listener))

    def send(self, command: Command) -> None:
        if isinstance(command, Add):
            call = self._calls[command.request.request_id] = _Call(command.request)
            call.task = self._start(self._run(call))
        elif isinstance(command, Abort):
            self._abort(command)
        elif isinstance(command, Ask):
            self._start(send_reply(command, self._ask_all(command.what), self._report))

    async def close(self, *, at_once: bool = False) -> None:
        """The engines are their replicas', which end them."""
        for call in self._calls.values():
            call.close()
        await self._tasks.cancel()

    async def _wait_ready(self, listener: LinkListener) -> None:
        for number in itertools.count(1):
            try:
                info = await self._engines.info()
            except Exception as error:  # noqa: BLE001 - Serve's errors and those of the network have no common class
                _LOG.warning("no engine can be asked yet: %s", error)
                await asyncio.sleep(growing_pause_s(number, _FIRST_PAUSE_S, _LONGEST_PAUSE_S))
            else:
                break
        self._block_tokens = info.cached_block_tokens
        count = self._max_replicas
        joint = {"max_running": info.max_running * count, "queue_length": info.queue_length * count}
        listener.handle(Ready(msgspec.structs.replace(info, **joint)))

    async def _run(self, call: _Call) -> None:
        """Have replicas run a request, one after another, until one of them has begun it or it is refused."""
        request_id = call.request.request_id
        error: RealizarError | None = None
        try:
            for number in range(_MAX_SENDS):
                if number:
                    await asyncio.sleep(_FIRST_PAUSE_S * number)
                error = await self._try(call)
                if error is None or call.begun or call.num_queued == _MAX_LOSSES:
                    break
            if error is not None:
                lost = RequestsLost((request_id,), record_error(error))
                self._report(lost if call.accepted else Refused(request_id, record_error(error)))
        finally:
            if self._calls.get(request_id) is call:
                self._calls.forget(request_id)

    async def _try(self, call: _Call) -> RealizarError | None:
        """Have one replica run a request; the error with which it lost the request, or None at the request's end."""
        request = call.request
        sent = replace(request, request_id=f"{self._prefix}-{request.request_id}")
        translation = _Translation(request.request_id, next(self._serials))
        call.wish = wish_of(request, self._block_tokens, call.replica)
        parts = self._engines.run(_ENCODER.encode(sent), call.wish)
        try:
            async with aclosing(parts):
                async for part in parts:
                    reports = _REPORTS.decode(part)
                    translation.note_clock(reports.sent_s, time.monotonic())
                    call.replica = reports.replica
                    for event in reports.events:
                        if isinstance(event, RequestsLost):
                            return EngineDeadError(event.error.message)
                        if isinstance(event, Refused) and event.error.kind == EngineUnavailableError.__name__:
                            return EngineUnavailableError(event.error.message, event.error.retry_after_s or 1.0)
                        self._take(call, event, translation)
        except Exception as error:  # noqa: BLE001 - as in `_wait_ready`
            if call.closed:  # its end was no clean one, and nobody waits for it
                return None
            _LOG.warning("a replica lost a request: %s", " ".join(str(error).split())[:300])
            return EngineDeadError("the replica that had this request is gone")
        finally:
            call.wish.has_ended = True
        return None if call.done or call.closed else EngineDeadError("the replica that had this request ended it")

    def _take(self, call: _Call, event: Accepted | Refused | PromptRead | Outputs, translation: _Translation) -> None:
        if isinstance(event, Outputs):
            event = Outputs(translation.deltas(event.deltas))
            self._follow(call, event.deltas)
            self._report(event)
            return
        if isinstance(event, Refused):
            call.done = True
            if call.accepted:  # by a replica that is gone
                self._report(RequestsLost((call.request.request_id,), event.error))
                return
        elif isinstance(event, Accepted):
            call.num_queued += 1
            event = Accepted(event.request_id, call.replica or "")
        self._report(msgspec.structs.replace(event, request_id=call.request.request_id))

    def _follow(self, call: _Call, deltas: StepDeltas) -> None:
        call.begun = True
        if call.wish is not None:
            call.wish.has_begun = True
        self._calls.note_starts(deltas.starts)
        ends = [known.choice for end in deltas.ends if (known := self._calls.start_of(end.number)) is not None]
        call.ended.update(ends)
        call.done |= len(call.ended) == call.request.sampling.n or bool(deltas.failures)

    def _abort(self, command: Abort) -> None:
        """End a call, when the text of all its choices is complete or nothing of it is wanted any more."""
        call = self._calls.get(command.request_id)
        if call is None:
            return
        if command.choice is not None:
            call.ended.add(command.choice)
            if len(call.ended) < call.request.sampling.n:
                return  # the others' deltas go on; this choice's are passed over
        call.close()

    async def _ask_all(self, what: Question) -> EngineStats | None:
        if what == "stats":
            self.figures.take(await self._engines.stats())
            return self.figures.total()
        if what != "clear_cache":
            raise InvalidRequestError(f"several engines can't {what}")
        try:
            await self._engines.clear_caches()
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise RealizarError(f"not every replica's cache was cleared: {reason}") from error
        return None

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work in a context of its own: Ray Serve would take all calls in that of one HTTP request for one."""
        return self._tasks.start(work, contextvars.Context())

    def _report(self, event: Any) -> None:
        if self._listener is not None:
            self._listener.handle(event)


_MOST_SILENT = 256


class EngineFigures:
    """Figures by replica. The counts of one that leaves stay in the sum, so that no counter falls."""

    def __init__(self) -> None:
        self.engines: dict[str, EngineStats] = {}
        self._silent: dict[str, EngineStats] = {}  # counts of replicas that did not answer: busy ones, or gone
        self._gone = EngineStats()

    def take(self, answers: Mapping[str, EngineStats]) -> None:
        for name in self.engines.keys() - answers.keys():
            self._silent[name] = EngineStats().plus(self.engines[name])
        for name in answers:
            self._silent.pop(name, None)
        while len(self._silent) > _MOST_SILENT:
            self._gone = self._gone.added(self._silent.pop(next(iter(self._silent))))
        self.engines = dict(sorted(answers.items()))

    def total(self) -> EngineStats:
        """The sum over all replicas that there have been; what is of the moment, over those that answered last."""
        total = self._gone
        for stats in (*self._silent.values(), *self.engines.values()):
            total = total.added(stats)
        return total


class _Translation:
    """Translates the deltas of one call.

    `request_id` is the front's own. `serial` is the same for all calls that a replica's one engine gets, or used once.
    """

    def __init__(self, request_id: str, serial: int) -> None:
        self._request_id, self._serial = request_id, serial
        self._clock_s = math.inf

    def note_clock(self, sent_s: float, received_s: float) -> None:
        """Compare the clocks, by a message and its time on each. The fastest message tells the most."""
        self._clock_s = min(self._clock_s, received_s - sent_s)

    def deltas(self, deltas: StepDeltas) -> StepDeltas:
        clock_s = self._clock_s
        starts = [
            replace(each, request_id=self._request_id, scheduled_s=each.scheduled_s + clock_s) for each in deltas.starts
        ]
        moved = replace(deltas, produced_s=deltas.produced_s + clock_s, starts=tuple(starts))
        return renumbered(moved, self._serial)
