"""`RayOptions`: how a model is served by Ray Serve, and what a replica takes of its host. Ray is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from realizar.config import EngineConfig
from realizar.engine.planned_load import PlannedLoad
from realizar.errors import InvalidRequestError, RealizarError
from realizar.ranges import check_ranges, number
from realizar.sampling_params import SamplingParams
from realizar.server.settings import ServerSettings
from realizar.sizes import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Options of one model's application. A value out of range raises `InvalidRequestError`.

    Attributes:
        names: ids that requests may use; answers carry the first. Empty takes the model's own.
        config: of every engine.
        settings: of the fronts' API. What concerns connections is Ray Serve's: its proxies have them.
        max_queued: choices that may wait in one engine; None takes the engine's own limit.
        sampling: of requests without parameters; None takes the values in the model's files, then the built-in ones.
        chat_template: text of a template that replaces the model's own.
        min_replicas, max_replicas: of the engine; between them the number follows the requests.
        target_requests: requests, running and waiting, that one replica should have on average; None takes as many as
            it runs at once.
        upscale_delay_s, downscale_delay_s: seconds that a need, or none, has to last before replicas start or end.
        fronts: processes that take requests, make tokens and text of them, and choose replicas.
        front_resources, engine_resources: resources of the cluster's own names that each of them takes, for hosts that
            were given such; none leaves their hosts to Ray Serve.
        memory_bytes: of a host's memory, or its GPU's, for one replica; None takes what is free where the application
            is built.
        stats_interval_s: seconds between reports of what replicas have in their prefix caches.
        drain_s: seconds that a replica may take for its last requests when it is to end.
        log_level: of fronts and engines.
    """

    names: tuple[str, ...] = ()
    config: EngineConfig = field(default_factory=EngineConfig)
    settings: ServerSettings = field(default_factory=ServerSettings)
    max_queued: int | None = None
    sampling: SamplingParams | None = None
    chat_template: str | None = None
    min_replicas: int = number(1, 1)
    max_replicas: int = number(1, 1)
    target_requests: float | None = None
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0
    fronts: int = number(1, 1)
    front_resources: dict[str, float] = field(default_factory=dict)
    engine_resources: dict[str, float] = field(default_factory=dict)
    memory_bytes: int | None = None
    stats_interval_s: float = 1.0
    drain_s: float = 600.0
    log_level: str = "info"

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.max_replicas < self.min_replicas:
            raise InvalidRequestError(
                f"max_replicas is {self.max_replicas}, below min_replicas {self.min_replicas}", "max_replicas"
            )
        if self.target_requests is not None and not self.target_requests > 0:
            raise InvalidRequestError(f"target_requests must be above 0, not {self.target_requests}", "target_requests")
        if self.settings.max_stored_responses and self.fronts > 1:
            raise InvalidRequestError(
                f"responses can't be kept by {self.fronts} fronts: each would have some of them only", "fronts"
            )

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> RayOptions:
        """Make the options from plain values, as a configuration file has them.

        It raises RealizarError if a field is unknown, of another type, or out of range.
        """
        unknown = sorted(set(fields) - set(cls.__dataclass_fields__))
        if unknown:
            raise RealizarError(f"args has no {unknown[0]}; it takes model, {', '.join(cls.__dataclass_fields__)}")
        try:
            return msgspec.convert(dict(fields), cls)
        except msgspec.ValidationError as error:
            raise RealizarError(f"args: {error}") from error


_PROCESS_BYTES = 400 << 20  # of the replica beside its engine: Ray's worker, and this package


@dataclass(frozen=True, slots=True)
class Placement:
    """Resources of one replica: as many logical processors as the engine has threads, GPUs, and memory of the host."""

    cpus: float
    gpus: int
    memory_bytes: int

    def shown(self) -> str:
        gpus = f"{self.gpus} GPU, " if self.gpus else ""
        return f"each with {gpus}{self.cpus:g} cores and {format_bytes(self.memory_bytes)} of memory"

    def actor_options(self) -> Mapping[str, float]:
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "memory": self.memory_bytes}


def placement_of(load: PlannedLoad, threads: int) -> Placement:
    if load.device == "cpu":
        return Placement(float(threads), 0, load.num_bytes + _PROCESS_BYTES)
    return Placement(1.0, 1, load.host_bytes + _PROCESS_BYTES)
