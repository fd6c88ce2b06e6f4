"""The cores, GPUs and memory that a replica takes of its host, by the plan of its model. Ray is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from realizar.engine.planned_load import PlannedLoad
from realizar.sizes import format_bytes

_PROCESS_BYTES = 400 << 20  # of the replica beside its engine: Ray's worker, and this package


@dataclass(frozen=True, slots=True)
class Placement:
    """Resources of one replica.

    Attributes:
        cpus: logical processors, as many as the engine has threads.
        gpus: whole GPUs.
        memory_bytes: of the host.
    """

    cpus: float
    gpus: int
    memory_bytes: int

    def shown(self) -> str:
        """The same in words."""
        gpus = f"{self.gpus} GPU, " if self.gpus else ""
        return f"each with {gpus}{self.cpus:g} cores and {format_bytes(self.memory_bytes)} of memory"

    def actor_options(self) -> Mapping[str, float]:
        """The same for Ray's `ray_actor_options`."""
        return {"num_cpus": self.cpus, "num_gpus": self.gpus, "memory": self.memory_bytes}


def placement_of(load: PlannedLoad, threads: int) -> Placement:
    """The resources of a planned load. Args: threads: of the engine on a CPU."""
    if load.device == "cpu":
        return Placement(float(threads), 0, load.num_bytes + _PROCESS_BYTES)
    return Placement(1.0, 1, load.host_bytes + _PROCESS_BYTES)
