"""`plan_replicas` divides a machine between the replicas of one model, in a process of its own.

`python -m realizar.replicas.planning` reads a question from stdin; the reason is that of `engine.process.planning`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from realizar.backends.cgroup import processor_quota
from realizar.backends.device_choice import choose_device, gpu_facts
from realizar.backends.machine import allowed_cpus, read_machine
from realizar.backends.select import resolve_model
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.engine.loading import find_checkpoint
from realizar.engine.planned_load import plan_within
from realizar.engine.process.planning import answer_question, ask_process
from realizar.errors import CapacityError, InvalidRequestError
from realizar.replicas.places import (
    Core,
    Gpu,
    Place,
    gpu_groups,
    gpu_node,
    places_on_cores,
    places_on_gpus,
    read_cores,
)
from realizar.sizes import format_bytes

_FREE_SHARE = 0.9


class PlannedReplica(msgspec.Struct, frozen=True):
    """A replica, as it is to be started.

    Attributes:
        config: of its engine.
        fit_context: the engine has to find a context that fits by itself.
        memory_bytes: its share of the host's memory, or what is free on its GPU, or on that of its GPUs with least.
        needed_bytes: what it takes of that; None where the engine finds out when it loads.
    """

    place: Place
    config: EngineConfig
    fit_context: bool
    memory_bytes: int
    needed_bytes: int | None = None

    @property
    def label(self) -> str:
        ranks = self.config.tensor_parallel
        where = self.place.label if ranks == 1 else f"{self.place.label}, {ranks} processes"
        if self.needed_bytes is None:
            return f"{where}, {format_bytes(self.memory_bytes)} free{'' if ranks == 1 else ' on each GPU'}"
        return f"{where}, {format_bytes(self.needed_bytes)} of {format_bytes(self.memory_bytes)}"


class ReplicaQuestion(msgspec.Struct, frozen=True):
    """What is to be planned; `config` is of each replica.

    `memory_bytes`, of the host or of each GPU; None is nine tenths of what is free on the host, or all on a GPU.
    """

    path: str
    config: EngineConfig
    num_replicas: int
    memory_bytes: int | None = None


def plan_replicas(path: str, config: EngineConfig, num_replicas: int) -> tuple[PlannedReplica, ...]:
    """Plan the replicas of a model in another process.

    Without a number of threads and a size of the KV cache in `config`, each gets its share of the machine's. It raises
    CapacityError if they don't fit or there are too few GPUs, RealizarError if the model can't run here.
    """
    question = ReplicaQuestion(path, config, num_replicas)
    module, what = "realizar.replicas.planning", "the replicas"
    planned: tuple[PlannedReplica, ...] = ask_process(module, what, question, tuple[PlannedReplica, ...])
    return planned


def divide(question: ReplicaQuestion) -> tuple[PlannedReplica, ...]:
    """Plan the replicas in this process; errors are those of `plan_replicas`."""
    config = question.config
    if config.layers_on is not None:
        raise InvalidRequestError("each replica has one device, and no layers_on", "layers_on")
    if config.device.startswith("cuda:"):
        raise InvalidRequestError(
            f"--device {config.device} names a GPU, and each replica has its own: use --device cuda", "device"
        )
    checkpoint, cores = find_checkpoint(question.path), read_cores(allowed_cpus())
    _, resolved = resolve_model(checkpoint, config, choose_device(config.device), question.memory_bytes)
    if resolved.chosen.kind == "cuda":
        return _on_gpus(question, gpu_facts()[0], cores)
    return _on_cores(checkpoint, question, cores)


def usable_gpus(facts: Sequence[dict[str, object]]) -> list[Gpu]:
    """The GPUs that can run a model, by the facts of `gpu_facts`."""
    return [
        Gpu(
            int(str(each["device"]).partition(":")[2]),
            None if each["bus_id"] is None else gpu_node(str(each["bus_id"])),
            str(each["name"]),
        )
        for each in facts
        if each["fault"] is None
    ]


def _on_gpus(
    question: ReplicaQuestion, facts: Sequence[dict[str, Any]], cores: Sequence[Core]
) -> tuple[PlannedReplica, ...]:
    gpus, count, ranks = usable_gpus(facts), question.num_replicas, question.config.tensor_parallel
    groups = gpu_groups(gpus, ranks, count)
    if len(groups) < count:
        needed = f"--replicas {count} needs as many GPUs"
        if ranks > 1:
            needed = f"--replicas {count} with --tensor-parallel {ranks} needs {count * ranks} GPUs"
            needed += ", those of each replica of one kind"
        raise CapacityError(f"{needed}, and {len(gpus)} can run a model here")
    config, memory = replace(question.config, device="cuda", host_sharers=count), question.memory_bytes
    free = {each["device"]: each["free_bytes"] for each in facts}
    return tuple(
        PlannedReplica(place, config, True, min(map(free.__getitem__, place.devices)) if memory is None else memory)
        for place in places_on_gpus(groups, cores)
    )


def _on_cores(checkpoint: Checkpoint, question: ReplicaQuestion, cores: Sequence[Core]) -> tuple[PlannedReplica, ...]:
    config, count = question.config, question.num_replicas
    memory_bytes = question.memory_bytes
    if memory_bytes is None:
        memory_bytes = int(read_machine().available_bytes * _FREE_SHARE)
    memory_bytes //= count
    quota = processor_quota()
    planned: list[PlannedReplica] = []
    for place in places_on_cores(cores, count):
        threads = config.threads or max(1, min(len(place.cores), len(cores) if quota is None else int(quota / count)))
        if threads < config.tensor_parallel:
            needed = f"tensor_parallel {config.tensor_parallel} needs as many threads"
            has = f"each of {count} replicas has {threads}; --threads gives it more"
            raise InvalidRequestError(f"{needed}, and {has}", "tensor_parallel")
        try:
            load, _ = plan_within(checkpoint, replace(config, device="cpu", threads=threads), memory_bytes)
        except CapacityError as error:
            raise CapacityError(f"with --replicas {count}, {error}") from error
        planned.append(PlannedReplica(place, load.config, False, memory_bytes, load.num_bytes))
    return tuple(planned)


if __name__ == "__main__":
    sys.exit(answer_question(ReplicaQuestion, divide))
