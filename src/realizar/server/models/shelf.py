"""`ModelShelf`: the `Models` of a server with several. Each is loaded on first use, within a bound of memory.

A request takes a lease of its model. A model that has to make room takes no further requests, ends those that use it,
and sleeps or is unloaded then; requests for it wait for their turn. `placing` decides, and `lives` does it.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, get_args

from realizar.engine.frontend.async_engine import EngineState
from realizar.engine.frontend.async_link import closed_error
from realizar.engine.process.messages import Loading
from realizar.engine.stats import EngineStats
from realizar.errors import QueueFullError, RealizarError
from realizar.request import Client
from realizar.server.api import Api
from realizar.server.errors import cleaned
from realizar.server.metrics import Metrics, MetricSamples, add_samples, exposition_of, table_samples
from realizar.server.models.lives import EngineLives, StartEngine, log
from realizar.server.models.models import ModelLease, ModelState, ModelStatus
from realizar.server.models.names import not_loaded, not_named, not_served, shutting_down
from realizar.server.models.placing import decide
from realizar.server.models.pulls import Pulls
from realizar.server.models.shelved import KnownModel, Running, ShelvedModel, Turn, Waiter
from realizar.sizes import format_bytes

_LOG = logging.getLogger(__name__)


class ModelShelf:
    """Models by name. See `Models` for what handlers call, `Served` for what runs a server, and `lives.Shelf`.

    Args:
        bytes_of_pools: memory that all models of a device may take together; each fits alone.
        keep_alive_s: seconds without a request after which a model is unloaded; None is never.
        host_bytes: memory of the host in which weights of models that make room may wait; 0 has them unloaded.
    """

    several: ClassVar[bool] = True
    loading: Loading | None = None
    fault: str | None = None
    pulls: Pulls | None = None

    def __init__(
        self,
        models: Sequence[KnownModel],
        start_engine: StartEngine,
        bytes_of_pools: Mapping[str, int],
        keep_alive_s: float | None = None,
        host_bytes: int = 0,
    ) -> None:
        self._models = {known.name: ShelvedModel(known, Metrics(known.name)) for known in models}
        self._lives = EngineLives(start_engine, self)
        self.bytes_of_pools, self._keep_alive_s, self.host_bytes = dict(bytes_of_pools), keep_alive_s, host_bytes
        self._numbers = itertools.count(1)
        self._num_begun = 0  # loads and wakes
        self.state: EngineState = "ready"
        self._ended = asyncio.Event()
        self._released = asyncio.Event()
        self._on_change: Callable[[Sequence[ModelStatus]], None] = lambda _: None
        self._reported: list[tuple[object, ...]] = []

    def when_changed(self, on_change: Callable[[Sequence[ModelStatus]], None]) -> None:
        """Call back with all models, now and whenever the state of one has changed."""
        self._on_change = on_change
        self._report_changes()

    def add(self, known: KnownModel, bytes_of_pool: int) -> None:
        """Serve another model from now on; `bytes_of_pool` is for a device without models."""
        self.bytes_of_pools.setdefault(known.load.device, bytes_of_pool)
        self._models.setdefault(known.name, ShelvedModel(known, Metrics(known.name)))
        self._report_changes()

    @property
    def num_open(self) -> int:
        return sum(model.num_leases for model in self._models.values())

    def listed(self) -> Sequence[ModelStatus]:
        return [_status_of(model) for model in self._models.values()]

    def find(self, name: str | None) -> ModelStatus:
        """A request has to name a model."""
        return _status_of(self._find(name))

    def take(self, name: str | None, keep_alive_s: float | None = None) -> ModelLease | None:
        model = self._find(name)
        self._check(model)
        model.keep_alive_s = self._keep_alive_s if keep_alive_s is None else keep_alive_s
        if model.stage == "ready" and not model.is_wanted_away and model.running is not None:
            return self._lease(model, model.running)
        return None

    async def wait(self, name: str | None, client: Client) -> ModelLease:
        """Requests that wait when a model is ready get it all at once.

        Raises:
            QueueFullError: as many wait as the model's engine would take, and the client has its share of them.
            EngineUnavailableError: the server shuts down. ApiError: 503; the model can't be loaded.
        """
        model = self._find(name)
        self._check(model)
        most = model.load.max_open
        if not model.places.has_room(client, 1, most):
            raise QueueFullError(f"{most} requests wait for the model {model.name} already; try again later", 5.0)
        turn = self._turn(model, client.name)
        waiter = Waiter(client.name, turn, next(self._numbers), asyncio.get_running_loop().create_future())
        model.waiters.append(waiter)
        model.places.take(client)
        try:
            self.settle()
            return await waiter.lease
        except asyncio.CancelledError:
            if waiter.lease.done() and not waiter.lease.cancelled() and waiter.lease.exception() is None:
                waiter.lease.result().release()
            raise
        finally:
            model.places.give(client)
            if waiter in model.waiters:
                model.waiters.remove(waiter)
                self.settle()

    def running(self, name: str | None = None) -> Sequence[Api]:
        """The cache of a model that is asleep is empty."""
        wanted = self._models.values() if name is None else (self._find(name),)
        found = [each.running.api for each in wanted if each.running is not None]
        return [api for api in found if api.engine.state == "ready"]

    def end_sleep(self, name: str) -> None:
        model = self._find(name)
        if model.waiters:
            return
        if model.stage == "asleep":
            log(model, "unloaded while it was asleep, for a client")
            self._lives.close(model)
            self.settle()
        elif model.stage == "sleeping":
            model.unloads_s = asyncio.get_running_loop().time()
        elif model.stage == "ready" and model.is_wanted_away:
            model.keep_alive_s = 0.0
            self.settle()

    async def exposition(self, others: Sequence[MetricSamples]) -> bytes:
        models = list(self._models.values())
        stats = await asyncio.gather(*map(_stats_of, models))
        samples = [each.metrics.samples() for each in models]
        by_name = {model.name: each for model, each in zip(models, stats, strict=True)}
        return exposition_of(by_name, (*add_samples(samples), *shelf_samples(models), *others))

    async def audits(self) -> dict[str, str | None]:
        """The finding of the engine's audit, or None, of each model that is ready."""
        return {api.model.name: await api.engine.audit() for api in self.running()}

    async def start(self) -> None:
        """No model is loaded before its first request."""

    async def wait_ready(self) -> None:
        """See `Served`."""

    async def wait_dead(self) -> RealizarError:
        """The end of one model's engine is not the server's."""
        await self._ended.wait()
        return closed_error()

    async def drain(self) -> None:
        """Refuse new requests and those that wait, give pulls up, and wait for the requests that use a model."""
        if self.state == "ready":
            self.state = "draining"
        for model in self._models.values():
            self._refuse_waiters(model, shutting_down)
        self.settle()
        if self.pulls is not None:
            await self.pulls.close()
        while self.num_open:
            self._released.clear()
            await self._released.wait()

    async def close(self, *, at_once: bool = False) -> None:
        """Requests that wait get an error."""
        self.state = "dead"
        self._ended.set()
        if self.pulls is not None:
            await self.pulls.close()
        for model in self._models.values():
            self._refuse_waiters(model, shutting_down)
            self._lives.close(model, at_once=at_once)
        await self._lives.ended()

    def _find(self, name: str | None) -> ShelvedModel:
        if name is None:
            raise not_named(tuple(self._models))
        model = self._models.get(name)
        if model is None:
            raise not_served(name, tuple(self._models), tuple(self._models))
        return model

    def _check(self, model: ShelvedModel) -> None:
        if self.state != "ready":
            raise shutting_down()
        pause_s = model.retry_s - asyncio.get_running_loop().time()
        if model.stage == "failed" and model.fault is not None and pause_s > 0:
            raise not_loaded(model.name, model.fault, pause_s)

    def _turn(self, model: ShelvedModel, client: str) -> Turn:
        """A client's turn for a model, after all that it waits for already."""
        waiting = [(each, waiter) for each in self._models.values() for waiter in each.waiters]
        turns = {each: waiter.turn for each, waiter in waiting if waiter.client == client}
        if model in turns:
            return turns[model]
        return max([self._num_begun, *(number + 1 for number, _ in turns.values())]), len(turns)

    def settle(self) -> None:
        if self.state == "dead":
            return
        now_s = asyncio.get_running_loop().time()
        for model in self._models.values():
            if model.stage == "asleep" and model.unloads_s is not None and model.unloads_s <= now_s:
                self._end_idle_time(model)  # its time was over while it fell asleep
        while True:
            decision = decide(list(self._models.values()), self.bytes_of_pools, self.host_bytes)
            for model in self._models.values():
                model.is_wanted_away = model in decision.yielding
            served = [each for each in self._models.values() if each.waiters and each.stage == "ready"]
            served = [each for each in served if not each.is_wanted_away]
            if not served:
                break
            for model in served:  # who waits no more changes what is to be done
                self._serve_waiters(model)
        for model, way in decision.yielding.items():
            if model.num_leases == 0 and way == "unload":
                log(model, "unloaded: another model needs its place")
                self._lives.close(model)
            elif model.num_leases == 0 and way == "sleep":
                self._lives.sleep(model)
        for model in decision.loads:
            self._num_begun += 1
            if model.stage == "asleep":
                self._lives.wake(model)
            else:
                self._lives.load(model)
        self._report_changes()

    def _report_changes(self) -> None:
        models = self._models.values()
        states: list[tuple[object, ...]] = [(each.name, each.stage, each.state, each.held_bytes) for each in models]
        if states != self._reported:
            self._reported = states
            self._on_change([_status_of(model) for model in models])

    def note_ready(self, model: ShelvedModel) -> None:
        self._serve_waiters(model)
        if model.num_leases == 0:  # whoever waited has gone
            self._begin_idle_time(model)

    def note_failed(self, model: ShelvedModel, error: RealizarError) -> None:
        loop = asyncio.get_running_loop()
        model.note_failure(error, loop.time())
        _LOG.error("%s: not loaded: %s", model.name, error)
        self._refuse_waiters(model, lambda: not_loaded(model.name, error, model.retry_s - loop.time()))

    def taken(self, model: ShelvedModel) -> str:
        pool = model.load.device
        taken = sum(each.held_bytes for each in self._models.values() if each.load.device == pool)
        text = f"{format_bytes(taken)} of {format_bytes(self.bytes_of_pools[pool])} taken"
        host = sum(each.held_host_bytes for each in self._models.values())
        return f"{text}, {format_bytes(host)} of {format_bytes(self.host_bytes)} of the host" if host else text

    def _serve_waiters(self, model: ShelvedModel) -> None:
        while model.waiters and model.running is not None:
            waiter = model.waiters.popleft()
            if not waiter.lease.done():
                waiter.lease.set_result(self._lease(model, model.running))

    def _refuse_waiters(self, model: ShelvedModel, make_error: Callable[[], Exception]) -> None:
        while model.waiters:
            waiter = model.waiters.popleft()
            if not waiter.lease.done():
                waiter.lease.set_exception(make_error())

    def _lease(self, model: ShelvedModel, running: Running) -> ModelLease:
        running.num_leases += 1
        model.last_used, model.unloads_s = next(self._numbers), None
        return ModelLease(running.api, functools.partial(self._release, model, running))

    def _release(self, model: ShelvedModel, running: Running) -> None:
        running.num_leases -= 1
        self._released.set()
        if running is not model.running:  # its engine died meanwhile
            return
        model.last_used = next(self._numbers)
        if running.num_leases == 0 and model.stage == "ready":
            self._begin_idle_time(model)  # which goes on in sleep
            if model.is_wanted_away:
                self.settle()

    def _begin_idle_time(self, model: ShelvedModel) -> None:
        """Have a model that nobody uses unloaded when its idle time is over, if it has one."""
        delay_s = model.keep_alive_s
        if delay_s is None or delay_s < 0:
            return
        loop = asyncio.get_running_loop()
        due_s = model.unloads_s = loop.time() + delay_s

        def end() -> None:
            if model.unloads_s == due_s and model.stage in ("ready", "asleep") and model.num_leases == 0:
                self._end_idle_time(model)

        loop.call_later(delay_s, end)

    def _end_idle_time(self, model: ShelvedModel) -> None:
        log(model, "unloaded: its time without a request is over")
        self._lives.close(model)


_GAUGES = (
    ("num_requests_waiting_for_model", "Requests that wait until it is loaded.", "num_waiting"),
    ("model_planned_bytes", "Memory that was planned for its engine.", "held_bytes"),
    ("model_host_bytes", "Memory of the host that is kept for its weights.", "held_host_bytes"),
)
_COUNTERS = (
    ("model_loads", "Times that a model was loaded.", "num_loads"),
    ("model_wakes", "Times that a model came back from the host's memory.", "num_wakes"),
)


def shelf_samples(models: Sequence[ShelvedModel]) -> tuple[MetricSamples, ...]:
    owners = [({"model_name": each.name}, each) for each in models]
    states = [(labels, each.state) for labels, each in owners]
    return (
        MetricSamples.of_states(
            "realizar:model_state", "1 for the state that a model is in.", get_args(ModelState), states
        ),
        *table_samples("realizar:", "gauge", _GAUGES, owners),
        *table_samples("realizar:", "counter", _COUNTERS, owners),
    )


# Reports of a server with several models: their states, and figures over all their engines.


async def _stats_of(model: ShelvedModel) -> EngineStats:
    earlier = model.earlier_stats  # an engine that is unloaded meanwhile is added to it, and would count twice
    current = EngineStats() if model.running is None else await model.running.engine.stats()
    return current.plus(earlier)


def _status_of(model: ShelvedModel) -> ModelStatus:
    known, running = model.known, model.running
    unloads_s = None
    if model.unloads_s is not None:
        unloads_s = round(time.time() + model.unloads_s - asyncio.get_running_loop().time(), 3)
    alive = None if running is None or running.engine.state != "ready" else running.api
    device = None if alive is None else alive.engine.info.device
    return ModelStatus(
        (known.name,),
        known.created_s,
        known.load.context_length if running is None or running.engine.state == "dead" else running.api.max_model_len,
        known.default_sampling,
        known.facts if running is None else running.api.model.facts,
        model.state,
        None if model.fault is None else cleaned(str(model.fault)),
        model.load.num_bytes,
        unloads_s,
        device,
        model.held_bytes,
        model.held_host_bytes or None,
        None if alive is None else alive.engine.info.device_label,
    )
