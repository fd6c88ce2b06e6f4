"""`ShelvedModel`: a model of a server that has several, with its state and the requests that use it or wait for it."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from realizar.engine.clients.async_engine import AsyncEngine
from realizar.engine.core.metrics import EngineStats
from realizar.engine.planned_load import PlannedLoad
from realizar.errors import RealizarError
from realizar.sampling_params import SamplingParams
from realizar.server.api import Api
from realizar.server.metrics import Metrics
from realizar.server.model_facts import ModelFacts
from realizar.server.models.models import ModelLease, ModelState

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Seconds after a failed load in which requests get its error; it doubles with each failure in a row."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that a server may load.

    Attributes:
        name: id that requests use.
        path: of its files.
        load: its configuration and its memory, as planned from the header.
        default_sampling: sampling of requests without parameters.
        facts: of its files.
        created_s: Unix time.
    """

    name: str
    path: str
    load: PlannedLoad
    default_sampling: SamplingParams
    facts: ModelFacts
    created_s: int


@dataclass(eq=False, slots=True)
class Running:
    """A loaded model. Attributes: api: what handlers work with. num_leases: requests that use it."""

    api: Api
    num_leases: int = 0

    @property
    def engine(self) -> AsyncEngine:
        return self.api.engine


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request that waits. Attributes: number: in the order of arrival, over all models. lease: what it waits for."""

    number: int
    lease: asyncio.Future[ModelLease]


_Stage: TypeAlias = Literal["known", "loading", "ready", "closing", "failed"]


@dataclass(eq=False, slots=True)
class ShelvedModel:
    """A model and what becomes of it.

    Attributes:
        known: facts that stay.
        metrics: over all its loads. earlier_stats: of its engines that have ended.
        stage: of its engine. `failed` is `known` after a failure.
        is_wanted_away: another model gets its place when its last request has ended.
        running: what runs while the stage is `ready` or `closing`.
        waiters: requests that wait for it, the oldest first.
        last_used: number of the last event of a request that used it; higher is later.
        keep_alive_s: seconds without a request after which it is unloaded; None is never.
        unloads_s: time of the event loop at which that happens; None if it is in use or never will.
        fault: the last failure, and retry_s: time of the event loop until which requests get its error.
        num_failures: failed loads in a row. num_loads: all that ended well.
    """

    known: KnownModel
    metrics: Metrics
    earlier_stats: EngineStats = field(default_factory=EngineStats)
    stage: _Stage = "known"
    is_wanted_away: bool = False
    running: Running | None = None
    waiters: deque[Waiter] = field(default_factory=deque)
    last_used: int = 0
    keep_alive_s: float | None = None
    unloads_s: float | None = None
    fault: RealizarError | None = None
    retry_s: float = 0.0
    num_failures: int = 0
    num_loads: int = 0

    @property
    def name(self) -> str:
        return self.known.name

    @property
    def num_bytes(self) -> int:
        """Memory that it takes while it is loading, ready or closing."""
        return self.known.load.num_bytes

    @property
    def pool(self) -> str:
        """The device whose memory it takes."""
        return self.known.load.device

    @property
    def num_leases(self) -> int:
        """Requests that use it."""
        return 0 if self.running is None else self.running.num_leases

    @property
    def holds_memory(self) -> bool:
        """True if an engine of it exists."""
        return self.stage in ("loading", "ready", "closing")

    @property
    def state(self) -> ModelState:
        """The state that lists show."""
        if self.stage == "closing" or (self.stage == "ready" and self.is_wanted_away):
            return "finishing"
        if self.stage == "ready" and self.running is not None and self.running.engine.state == "starting":
            return "loading"  # after its engine died
        return self.stage

    def note_failure(self, error: RealizarError, now_s: float) -> None:
        """Remember why it could not be loaded. Requests get the error until a pause is over."""
        pause_s = min(FIRST_PAUSE_S * 2 ** min(self.num_failures, 30), LONGEST_PAUSE_S)
        self.num_failures += 1
        self.fault, self.retry_s = error, now_s + pause_s
