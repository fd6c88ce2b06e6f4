"""`EngineLives` starts and ends the engines of models, and has them sleep and wake."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from realizar.backends.base import Transfer
from realizar.checkpoint.model_files import ModelFiles
from realizar.engine.frontend.tasks import Tasks
from realizar.engine.loading import find_checkpoint
from realizar.engine.process.child import LivenessPolicy
from realizar.engine.process.messages import Load
from realizar.engine.process.supervisor import ProcessLink
from realizar.engine.stats import EngineStats
from realizar.errors import RealizarError
from realizar.server.api import Api, make_api
from realizar.server.metrics import Metrics
from realizar.server.models.shelved import KnownModel, Running, ShelvedModel
from realizar.server.request_templates import compile_apart
from realizar.server.served_model import ServedModel, make_served_model
from realizar.server.settings import ServerSettings
from realizar.sizes import format_bytes

if TYPE_CHECKING:
    from realizar.server.models.shelf import ModelShelf

_LOG = logging.getLogger(__name__)
_LIVENESS = LivenessPolicy(max_crashes=1)
"""An engine that ends without a request to blame is not started again: the model's next request loads it."""


StartEngine: TypeAlias = Callable[[KnownModel, Metrics], Awaitable[Api]]
"""Starts an engine and waits until it is ready; when it is cancelled the engine is ended first.

It raises RealizarError if the model can't be loaded; nothing of it is left."""


@dataclass(frozen=True, slots=True)
class EngineLoader:
    """Its `load` is a `StartEngine`: it reads the vocabulary, and starts an engine in a process of its own.

    `files` are those of each model, by name, as they were when it was planned. `max_queued` is as in `AsyncEngine`.
    """

    files: dict[str, ModelFiles]
    settings: ServerSettings
    log_level: str
    max_queued: int | None

    async def load(self, known: KnownModel, metrics: Metrics) -> Api:
        served = await asyncio.to_thread(self._served, known)
        may_sleep = known.load.host_bytes > 0
        load = Load(known.path, known.load.config, log_level=self.log_level.upper(), may_sleep=may_sleep)
        label = f"engine of {known.name}"
        link = ProcessLink(load, _LIVENESS, files=self.files[known.name], label=label)
        engine = served.engine(link, self.max_queued, known.facts.pooling)
        try:
            await engine.start()
            await engine.wait_ready()
        except BaseException:
            await engine.close(at_once=True)
            raise
        return make_api(engine, served, self.settings, metrics)

    def _served(self, known: KnownModel) -> ServedModel:
        fault = self.files[known.name].fault()
        if fault is not None:
            raise RealizarError(fault)
        return make_served_model(
            find_checkpoint(known.path),
            (known.name,),
            known.load.context_length,
            known.default_sampling,
            created_s=known.created_s,
            compiler=compile_apart if known.by_client else None,
            config=known.load.config,
        )


class EngineLives:
    """Changes the stages of models. Everything runs in tasks; each ends with `settle`."""

    def __init__(self, start_engine: StartEngine, shelf: ModelShelf) -> None:
        self._start_engine, self._shelf = start_engine, shelf
        self._tasks = Tasks()
        self._loads: dict[ShelvedModel, asyncio.Task[None]] = {}

    async def ended(self) -> None:
        await self._tasks.ended()

    def load(self, model: ShelvedModel) -> None:
        model.stage = "loading"
        loading = self._loads[model] = self._tasks.start(self._load(model))
        loading.add_done_callback(lambda task: self._load_ended(model, task))

    def sleep(self, model: ShelvedModel) -> None:
        """Have an idle model's weights wait in the host's memory; it is unloaded where that fails."""
        if model.running is not None:
            model.stage, model.is_wanted_away = "sleeping", False
            self._tasks.start(self._sleep(model, model.running))

    def wake(self, model: ShelvedModel) -> None:
        if model.running is not None:
            model.stage = "waking"
            self._tasks.start(self._wake(model, model.running))

    def close(self, model: ShelvedModel, *, at_once: bool = False, after: str = "known") -> None:
        """Have a model's engine end, if it has one; the stage `after` follows. Its memory counts until it has ended."""
        if model.stage == "loading":
            model.stage = "closing"
            self._loads[model].cancel()
        elif model.stage in ("ready", "sleeping", "asleep", "waking") and model.running is not None:
            model.stage, model.is_wanted_away, model.unloads_s = "closing", False, None
            self._tasks.start(self._unload(model, model.running, at_once=at_once, failed=after == "failed"))

    async def _load(self, model: ShelvedModel) -> None:
        started_s = asyncio.get_running_loop().time()
        log(model, "being loaded")
        try:
            api = await self._start_engine(model.known, model.metrics)
        except asyncio.CancelledError:
            log(model, "not loaded: nobody waits for it any more")
            raise
        except RealizarError as error:
            self._fail(model, error)
        except BaseException as error:  # a fault of this program must not leave requests waiting
            self._fail(model, RealizarError(f"{type(error).__name__}: {error}"))
            raise
        else:
            running = model.running = Running(api)
            model.stage, model.fault = "ready", None
            model.num_failures, model.num_loads = 0, model.num_loads + 1
            self._tasks.start(self._watch(model, running))
            self._shelf.note_ready(model)
            seconds = asyncio.get_running_loop().time() - started_s
            log(model, f"ready after {seconds:.1f} s, {self._shelf.taken(model)}")

    def _load_ended(self, model: ShelvedModel, loading: asyncio.Task[None]) -> None:
        """Go on after a load. One that is cancelled before it begins runs nothing of its own."""
        self._loads.pop(model, None)
        if loading.cancelled():
            model.stage = "known"
        self._shelf.settle()

    async def _sleep(self, model: ShelvedModel, running: Running) -> None:
        try:
            done = await running.engine.sleep()
        except RealizarError as error:
            if model.stage == "sleeping":
                _LOG.error("%s: it can't sleep and is unloaded: %s", model.name, error)
                self.close(model)
        else:
            running.is_asleep = running.has_slept = True
            if model.stage == "sleeping":
                model.stage = "asleep"
                log(model, f"asleep, {_described(done)} to the host's memory; {self._shelf.taken(model)}")
        self._shelf.settle()

    async def _wake(self, model: ShelvedModel, running: Running) -> None:
        try:
            done = await running.engine.wake()
        except RealizarError as error:
            if model.stage == "waking":
                self._shelf.note_failed(model, error)
                self.close(model, after="failed")
        else:
            running.is_asleep = False
            if model.stage == "waking":
                model.stage, model.num_wakes = "ready", model.num_wakes + 1
                log(model, f"awake, {_described(done)} from the host's memory; {self._shelf.taken(model)}")
                self._shelf.note_ready(model)
        self._shelf.settle()

    def _fail(self, model: ShelvedModel, error: RealizarError) -> None:
        model.stage = "failed"
        self._shelf.note_failed(model, error)

    async def _watch(self, model: ShelvedModel, running: Running) -> None:
        """Wait until an engine is gone for good, and clear it away; the next request loads the model again."""
        error = await running.engine.wait_dead()
        if model.running is running and model.stage in ("ready", "asleep"):
            _LOG.error("%s: its engine has ended: %s", model.name, error)
            model.fault, model.retry_s = error, 0.0
            self.close(model, after="failed")
            self._shelf.settle()

    async def _unload(self, model: ShelvedModel, running: Running, *, at_once: bool, failed: bool) -> None:
        try:
            stats = EngineStats() if at_once else await running.engine.stats()
            await running.engine.close(at_once=at_once)
            model.earlier_stats = stats.plus(model.earlier_stats)
        finally:
            model.running, model.stage = None, "failed" if failed else "known"
            self._shelf.settle()


def log(model: ShelvedModel, text: str) -> None:
    _LOG.info("%s: %s", model.name, text)


def _described(done: Transfer) -> str:
    rate = f", {done.num_bytes / done.seconds / 1e9:.1f} GB/s" if done.seconds > 0 else ""
    return f"{format_bytes(done.num_bytes)} in {done.seconds:.2f} s{rate}"
