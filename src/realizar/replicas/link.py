"""`ReplicaLink`: several engines as one `EngineLink`. Requests go where their prefixes are."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

import msgspec

from realizar.checkpoint.model_files import ModelFiles
from realizar.engine.delta_shares import renumbered
from realizar.engine.frontend.async_link import EngineLink, LinkListener
from realizar.engine.frontend.open_table import OpenTable
from realizar.engine.frontend.questions import send_reply
from realizar.engine.frontend.tasks import Changes, Tasks
from realizar.engine.process import supervisor
from realizar.engine.process.messages import (
    Abort,
    Accepted,
    Add,
    Ask,
    CachedKeys,
    Command,
    EngineBlocked,
    EngineInfo,
    EngineLost,
    Event,
    Load,
    Loading,
    Outputs,
    Question,
    Ready,
    Refused,
    RequestsLost,
    WatchKeys,
)
from realizar.engine.stats import EngineStats
from realizar.errors import EngineDeadError, InvalidRequestError, RealizarError
from realizar.ipc.error_records import record_error, restore_error
from realizar.replicas.places import Place
from realizar.replicas.planning import PlannedReplica
from realizar.replicas.prompt_keys import prompt_keys, report_of
from realizar.replicas.replica import PlacedRequest, Replica, ReplicaState
from realizar.replicas.routing import PrefixRouter
from realizar.request import Request
from realizar.step_deltas import StepDeltas

_LOG = logging.getLogger(__name__)
_REVIVAL_S = 30.0  # after which an engine is started again in a place where engines died too often


class _Placement:
    """Sends each request to a replica by the router's choice, and follows it to its end.

    Without a prefix cache the router chooses by load alone.
    """

    def __init__(self, replicas: Iterable[Replica]) -> None:
        self._replicas = tuple(replicas)
        self._by_name = {replica.name: replica for replica in self._replicas}
        self._open: OpenTable[PlacedRequest] = OpenTable()
        self._block_tokens = 0
        self.router = PrefixRouter(1)

    def of(self, request_id: str) -> PlacedRequest | None:
        return self._open.get(request_id)

    def set_block_tokens(self, block_tokens: int) -> None:
        if block_tokens != self._block_tokens:
            self._block_tokens = block_tokens
            self.router = PrefixRouter(block_tokens)

    def place(self, request: Request) -> PlacedRequest | None:
        keys = prompt_keys(request, self._block_tokens)
        chosen = self._choose(keys, request.num_prompt_tokens)
        if chosen is None:
            return None
        placed = PlacedRequest(request, keys, *chosen, set(range(request.sampling.n)))
        self._open[request.request_id] = placed.replica.requests[request.request_id] = placed
        return placed

    def move(self, placed: PlacedRequest) -> bool:
        chosen = self._choose(placed.keys, placed.request.num_prompt_tokens)
        if chosen is None:
            return False
        placed.replica, placed.pending_tokens = chosen
        placed.num_moves += 1
        placed.replica.requests[placed.request.request_id] = placed
        return True

    def forget(self, request_id: str) -> None:
        """Forget a request, which has ended; an unknown one passes."""
        placed = self._open.forget(request_id)
        if placed is not None:
            placed.replica.requests.pop(request_id, None)

    def note_end(self, request_id: str, choice: int | None) -> None:
        placed = self._open.get(request_id)
        if placed is None:
            return
        if choice is not None:
            placed.open_choices.discard(choice)
        if choice is None or not placed.open_choices:
            self.forget(request_id)

    def note_deltas(self, deltas: StepDeltas) -> None:
        """Follow the requests of a step, whose numbers are unique over all replicas."""
        self._open.note_starts(deltas.starts)
        for start in deltas.starts:
            if (placed := self._open.get(start.request_id)) is not None:
                placed.has_begun, placed.pending_tokens = True, 0
        for end in deltas.ends:
            if (known := self._open.start_of(end.number)) is not None:
                self.note_end(known.request_id, known.choice)
        for failure in deltas.failures:
            if (known := self._open.start_of(failure.number)) is not None:
                self.forget(known.request_id)

    def clear(self) -> None:
        for request_id in list(self._open):
            self.forget(request_id)

    def _choose(self, keys: tuple[bytes, ...], num_tokens: int) -> tuple[Replica, int] | None:
        """A replica, and the tokens that it has to compute; one that drains only where no other works."""
        usable = [each for each in self._replicas if each.state == "ready"]
        usable = usable or [each for each in self._replicas if each.is_alive]
        route = self.router.choose(keys, num_tokens, {each.name: each.load for each in usable})
        if route is None:
            return None
        self.router.placed(route.replica, keys)
        return self._by_name[route.replica], num_tokens - route.num_cached_tokens


class ReplicaLink:
    """Several engines, which the `AsyncEngine` above takes for one; see `EngineLink`.

    An engine that can't load before all were ready once ends the link. After that the link lives as long as engines
    are being started, and the API answers as long as one is ready. When an engine dies, its requests of which something
    came end with an error. The others go to another replica, once: a request whose second engine dies may be the cause.
    So no request ends more than two engines, and its content is watched from then on (`Suspects`).

    `new_links` make links to engines that are not started yet, one for each replica. `num_moved` are requests that went
    to another replica when theirs died.
    """

    def __init__(self, new_links: Sequence[Callable[[], EngineLink]]) -> None:
        self.replicas = tuple(Replica(f"{number}", new_link, self._take) for number, new_link in enumerate(new_links))
        self._placement = _Placement(self.replicas)
        self._incarnations = itertools.count()
        self._listener: LinkListener | None = None
        self._tasks = Tasks()
        self._tried: set[str] = set()  # replicas whose first engine was ready, or died
        self._rolling: asyncio.Task[None] | None = None
        self.num_moved = 0
        self._has_begun = self._closed = False
        self._changed = Changes()
        self._on_states: Callable[[Sequence[ReplicaState]], None] = lambda _: None

    def num_keys(self, replica: Replica) -> int:
        return self._placement.router.num_keys(replica.name)

    def when_changed(self, on_states: Callable[[Sequence[ReplicaState]], None]) -> None:
        """Register a callback for the replicas' states, which is called with them now and after each change."""
        self._on_states = on_states
        self._note_states()

    async def start(self, listener: LinkListener) -> None:
        self._listener = listener
        for replica in self.replicas:
            await replica.start()

    def send(self, command: Command) -> None:
        """It raises InvalidRequestError if the command is too large to be sent, or not for several engines."""
        if isinstance(command, Add):
            self._add(command)
        elif isinstance(command, Abort):
            placed = self._placement.of(command.request_id)
            if placed is not None:
                placed.replica.send(command)
                self._placement.note_end(command.request_id, command.choice)
                self._changed.note()
        elif isinstance(command, Ask):
            self._tasks.start(send_reply(command, self._ask_all(command.what), self._pass_on))
        else:
            raise InvalidRequestError(f"several engines take no {type(command).__name__}")

    async def close(self, *, at_once: bool = False) -> None:
        self._closed = True
        await self._tasks.cancel()
        await asyncio.gather(*(replica.close(at_once=at_once) for replica in self.replicas))

    def restart_in_turn(self) -> None:
        """Begin to replace the engines one by one, so that no request fails; nothing happens while this goes on."""
        if self._rolling is None or self._rolling.done():
            self._rolling = self._tasks.start(self._replace_in_turn())
        else:
            _LOG.warning("the replicas are being restarted already")

    async def _replace_in_turn(self) -> None:
        """Replace every engine. Each gets no new requests, ends those it has, and the next waits until it is ready.

        One that dies meanwhile is replaced by its own link. The last one that is ready is never drained, and one that
        drains goes on where the others die.
        """
        _LOG.warning("%d replicas are restarted one by one", len(self.replicas))
        for replica in self.replicas:
            while not self._has_other(replica):
                await self._changed.wait()
            if replica.state == "ready":
                self._drain(replica)
                _LOG.warning("replica %s ends its %d requests", replica.name, len(replica.requests))
            while replica.state == "draining" and (replica.requests or not self._has_other(replica)):
                await self._changed.wait()
            if replica.state == "draining":
                await self._renew(replica)
            while replica.state != "ready":
                await self._changed.wait()
            _LOG.warning("replica %s is restarted", replica.name)
        _LOG.warning("all replicas are restarted")

    def _drain(self, replica: Replica) -> None:
        replica.state = "draining"
        self._note_states()

    def _has_other(self, replica: Replica) -> bool:
        return any(other.state == "ready" for other in self.replicas if other is not replica)

    async def _renew(self, replica: Replica) -> None:
        replica.state = "starting"
        replica.count_end(restarting=False)
        self._placement.router.leave(replica.name)
        self._report_ready()
        self._note_states()
        await replica.close()
        await replica.start()

    def _take(self, replica: Replica, event: Event) -> None:
        """Take what a replica reports. After `EngineLost` its engine's requests are still there."""
        if isinstance(event, Outputs):
            deltas = renumbered(event.deltas, replica.incarnation)
            self._placement.note_deltas(deltas)
            self._pass_on(Outputs(deltas))
            if deltas.ends or deltas.failures:
                self._changed.note()
        elif isinstance(event, CachedKeys):
            report = report_of(event.changes, replica.incarnation, replica.num_reports)
            replica.num_reports += 1
            self._placement.router.report(replica.name, report)
        elif isinstance(event, Accepted):
            placed = self._placement.of(event.request_id)
            if placed is not None:
                placed.was_accepted = True
                self._pass_on(Accepted(event.request_id, replica.name))
        elif isinstance(event, Refused):
            self._refuse(event)
        elif isinstance(event, Loading):
            if not self._has_begun:
                self._pass_on(Loading(f"replica {replica.name}: {event.what}", event.share))
        elif isinstance(event, Ready):
            self._ready(replica, event)
        elif isinstance(event, EngineLost):
            self._engine_lost(replica, event)
        elif not (isinstance(event, EngineBlocked) and any(each.is_alive for each in self.replicas)):
            self._pass_on(event)

    def _engine_lost(self, replica: Replica, event: EngineLost) -> None:
        error, restarting, blame = restore_error(event.error), event.restarting, event.blame
        lost = list(replica.requests.values())
        replica.requests.clear()
        self._note_states()
        self._placement.router.leave(replica.name)
        named = EngineDeadError(f"replica {replica.name}: {error}")
        if not self._has_begun:
            if not restarting:
                self._pass_loss(named, restarting=False, blame=blame)
                return
            self._tried.add(replica.name)
        if any(each.is_alive for each in self.replicas):
            self._lose(lost, named, blame=blame)
            self._report_ready()
        else:
            self._placement.clear()
            restarting_any = restarting or any(each.state == "starting" for each in self.replicas)
            if self._has_begun or not restarting_any:
                self._pass_loss(named, restarting=restarting_any, blame=blame)
        if not restarting and not self._closed:
            _LOG.error("replica %s gets another engine in %.0f s: %s", replica.name, _REVIVAL_S, error)
            self._tasks.start(self._revive(replica))
        self._changed.note()

    def _add(self, command: Add) -> None:
        placed = self._placement.place(command.request)
        if placed is None:
            raise EngineDeadError("no replica is ready")
        try:
            placed.replica.send(command)
        except RealizarError:
            self._placement.forget(command.request.request_id)
            raise

    def _ready(self, replica: Replica, event: Ready) -> None:
        self._tried.add(replica.name)
        replica.info, replica.state = event.info, "ready"
        replica.incarnation, replica.num_reports = next(self._incarnations), 0
        self._placement.set_block_tokens(event.info.cached_block_tokens)
        self._placement.router.begin(replica.name, replica.incarnation)
        if event.info.cached_block_tokens:
            replica.send(WatchKeys())
        self._report_ready()
        self._note_states()
        self._changed.note()

    def _report_ready(self) -> None:
        """Report readiness, and what engines can do together.

        One that is being replaced counts: requests for which the others have no room wait until it is there again.
        """
        infos = [each.info for each in self.replicas if each.state != "down" and each.info is not None]
        is_working = any(each.is_alive for each in self.replicas)
        if is_working and (self._has_begun or len(self._tried) == len(self.replicas)):
            self._has_begun = True
            self._pass_on(Ready(_joint_info(infos)))

    def _refuse(self, event: Refused) -> None:
        """Pass a refusal on; one of a request whose client knows that it is queued is the request's end."""
        placed = self._placement.of(event.request_id)
        self._placement.forget(event.request_id)
        self._changed.note()
        if placed is not None and placed.was_accepted:
            self._pass_on(RequestsLost((event.request_id,), event.error))
        else:
            self._pass_on(event)

    def _lose(self, requests: Sequence[PlacedRequest], error: RealizarError, *, blame: bool) -> None:
        """End the requests of a dead engine that have begun, and give the others to another one."""
        ended: list[PlacedRequest] = []
        moved: list[PlacedRequest] = []
        for each in requests:
            stays = each.has_begun or each.num_moves > 0
            (ended if stays or not self._move(each) else moved).append(each)
        for each in ended:
            self._placement.forget(each.request.request_id)
        self.num_moved += len(moved)
        suspects = tuple(each.request.request_id for each in requests)
        ids = tuple(each.request.request_id for each in ended)
        self._pass_on(RequestsLost(ids, record_error(error), blame, suspects))
        if requests:
            _LOG.warning("%s: %d requests ended, %d go on in other replicas", error, len(ended), len(moved))

    def _move(self, placed: PlacedRequest) -> bool:
        if not self._placement.move(placed):
            return False
        with suppress(InvalidRequestError):
            placed.replica.send(Add(placed.request))
            return True
        return False

    async def _revive(self, replica: Replica) -> None:
        """Start another engine in a place where they died too often, after a while."""
        await asyncio.sleep(_REVIVAL_S)
        await replica.close()
        await replica.start()
        self._note_states()

    async def _ask_all(self, what: Question) -> EngineStats | str | None:
        """Ask all engines: the sum of their figures, one that is busy as it last did, or the faults that they find.

        What one that ends meanwhile would have said does not count.
        """
        alive = [each for each in self.replicas if each.is_alive]
        if what == "stats":
            await asyncio.gather(*(each.refresh() for each in alive))
            return functools.reduce(EngineStats.added, (each.stats for each in self.replicas), EngineStats())
        if what not in ("audit", "clear_cache"):
            raise InvalidRequestError(f"several engines can't {what}")
        found = await asyncio.gather(*(each.asked.ask(what) for each in alive), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException) and not isinstance(each, EngineDeadError):
                raise each
        pairs = zip(alive, found, strict=True)
        return "; ".join(f"replica {each.name}: {fault}" for each, fault in pairs if isinstance(fault, str)) or None

    def _pass_on(self, event: Event) -> None:
        if self._listener is not None:
            self._listener.handle(event)

    def _pass_loss(self, error: RealizarError, *, restarting: bool, blame: bool) -> None:
        self._pass_on(EngineLost(record_error(error), restarting, blame, counted=True))

    def _note_states(self) -> None:
        self._on_states([each.state for each in self.replicas])


def _joint_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """What engines can do together: a request fits the smallest of them, and their rows and memory add up."""
    first = infos[0]
    capacity = replace(
        first.capacity,
        num_blocks=tuple(sum(counts) for counts in zip(*(each.capacity.num_blocks for each in infos), strict=True)),
        weight_bytes=sum(each.capacity.weight_bytes for each in infos),
        kv_cache_bytes=sum(each.capacity.kv_cache_bytes for each in infos),
        load_s=max(each.capacity.load_s for each in infos),
    )
    return msgspec.structs.replace(
        first,
        context_length=min(each.context_length for each in infos),
        max_request_tokens=min(each.max_request_tokens for each in infos),
        max_running=sum(each.max_running for each in infos),
        queue_length=sum(each.queue_length for each in infos),
        threads=sum(each.threads for each in infos),
        capacity=capacity,
        device_label=", ".join(dict.fromkeys(each.device_label for each in infos)),
    )


def make_replica_link(load: Load, planned: Sequence[PlannedReplica], files: ModelFiles) -> ReplicaLink:
    """Make the link to engines in processes of their own; the configurations of `planned` replace that of `load`."""
    return ReplicaLink(
        [
            functools.partial(supervisor.ProcessLink, _load_of(load, each), files=files, label=f"replica {number}")
            for number, each in enumerate(planned)
        ]
    )


def _load_of(load: Load, planned: PlannedReplica) -> Load:
    return msgspec.structs.replace(
        load,
        config=planned.config,
        fit_context=planned.fit_context,
        cores=planned.place.cpus,
        visible_gpus=visible_gpus(planned.place, os.environ.get("CUDA_VISIBLE_DEVICES")),
    )


def visible_gpus(place: Place, ours: str | None) -> str | None:
    """CUDA_VISIBLE_DEVICES of a replica: its GPUs, by the names that they have where this process sees `ours` alone."""
    if not place.gpus:
        return None
    names = [each.strip() for each in (ours or "").split(",") if each.strip()]
    return ",".join(names[gpu.index] if gpu.index < len(names) else str(gpu.index) for gpu in place.gpus)
