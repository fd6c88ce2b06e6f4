"""`ShelvedModel`: a model of a server that has several, with its state and the requests that use it or wait for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from realizar.engine.frontend.async_engine import AsyncEngine
from realizar.engine.frontend.places import Places
from realizar.engine.planned_load import PlannedLoad
from realizar.engine.process.child import growing_pause_s
from realizar.engine.stats import EngineStats
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
    """A model that a server may load; requests know it by `name`.

    `load` was planned from the header. `default_sampling` is for requests without parameters. `created_s` is Unix time.
    `by_client`: a client chose it, so that its template is a stranger's.
    """

    name: str
    path: str
    load: PlannedLoad
    default_sampling: SamplingParams
    facts: ModelFacts
    created_s: int
    by_client: bool = False


@dataclass(eq=False, slots=True)
class Running:
    """A loaded model, and the number of requests that use it; asleep, its weights are in the host's memory alone.

    `has_slept`: it holds memory of the host, which stays pinned for its next sleep.
    """

    api: Api
    num_leases: int = 0
    is_asleep: bool = False
    has_slept: bool = False

    @property
    def engine(self) -> AsyncEngine:
        return self.api.engine


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request of a client that waits; `number` is in the order of arrival, over all models."""

    client: str
    turn: Turn
    number: int
    lease: asyncio.Future[ModelLease]


Turn: TypeAlias = tuple[int, int]
"""Of a client for a model: the round in which it gets the model, and the models that it waited for before. A round is a
load that has begun. A client has one model in a round, and in a round those who wait for fewer go first."""

_Stage: TypeAlias = Literal["known", "loading", "ready", "sleeping", "asleep", "waking", "closing", "failed"]

_SHOWN: Mapping[_Stage, ModelState] = {
    "known": "known",
    "loading": "loading",
    "ready": "ready",
    "sleeping": "finishing",
    "asleep": "asleep",
    "waking": "loading",
    "closing": "finishing",
    "failed": "failed",
}


@dataclass(eq=False, slots=True)
class ShelvedModel:
    """A model and what becomes of it.

    Attributes:
        metrics: over all its loads. earlier_stats: of its engines that have ended.
        stage: of its engine. `failed` is `known` after a failure.
        is_wanted_away: another model gets its place when its last request has ended.
        running: what runs in all stages but `known`, `loading` and `failed`.
        waiters: requests that wait for it, the oldest first. places: that they take.
        last_used: number of the last event of a request that used it; higher is later.
        keep_alive_s: seconds without a request after which it is unloaded; None is never.
        unloads_s: time of the event loop at which that happens; None if it is in use or never will.
        fault: the last failure, and retry_s: time of the event loop until which requests get its error.
        num_failures: failed loads in a row. num_loads: all that ended well. num_wakes: from sleep.
    """

    known: KnownModel
    metrics: Metrics
    earlier_stats: EngineStats = field(default_factory=EngineStats)
    stage: _Stage = "known"
    is_wanted_away: bool = False
    running: Running | None = None
    waiters: deque[Waiter] = field(default_factory=deque)
    places: Places = field(default_factory=Places)
    last_used: int = 0
    keep_alive_s: float | None = None
    unloads_s: float | None = None
    fault: RealizarError | None = None
    retry_s: float = 0.0
    num_failures: int = 0
    num_loads: int = 0
    num_wakes: int = 0

    @property
    def name(self) -> str:
        return self.known.name

    @property
    def turn(self) -> tuple[Turn, int]:
        """Its place in the order of models that are waited for: that of the first of its waiters."""
        return min((waiter.turn, waiter.number) for waiter in self.waiters)

    @property
    def load(self) -> PlannedLoad:
        return self.known.load

    @property
    def num_leases(self) -> int:
        return 0 if self.running is None else self.running.num_leases

    @property
    def num_waiting(self) -> int:
        return len(self.waiters)

    @property
    def held_bytes(self) -> int:
        """Memory of the device that it takes now, at most."""
        if self.stage in ("known", "failed"):
            return 0
        is_asleep = self.running is not None and self.running.is_asleep and self.stage != "waking"
        return self.load.asleep_bytes if is_asleep else self.load.num_bytes

    @property
    def coming_bytes(self) -> int:
        """The same, when what has begun has ended."""
        if self.stage == "closing":
            return 0
        return self.load.asleep_bytes if self.stage == "sleeping" else self.held_bytes

    @property
    def held_host_bytes(self) -> int:
        has_slept = self.running is not None and self.running.has_slept
        return self.load.host_bytes if has_slept or self.stage == "sleeping" else 0

    @property
    def state(self) -> ModelState:
        if self.stage == "ready" and self.is_wanted_away:
            return "finishing"
        if self.stage == "ready" and self.running is not None and self.running.engine.state == "starting":
            return "loading"  # after its engine died
        return _SHOWN[self.stage]

    def note_failure(self, error: RealizarError, now_s: float) -> None:
        """Remember why it could not be loaded. Requests get the error until a pause is over."""
        self.num_failures += 1
        pause_s = growing_pause_s(self.num_failures, FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self.fault, self.retry_s = error, now_s + pause_s
