"""`plan_replicas` divides a machine between the replicas of one model, in a process of its own.

`python -m realizar.replicas.planning` reads a question from stdin: the server would otherwise have a backend's
libraries in its own memory, and a GPU open, for good.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from realizar.backends.cgroup import processor_quota
from realizar.backends.machine import read_machine
from realizar.backends.select import choose_device, gpu_facts
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.engine.loading import find_checkpoint
from realizar.engine.planned_load import plan_within
from realizar.engine.process.messages import ErrorRecord, record_error, restore_error
from realizar.errors import CapacityError, InvalidRequestError, RealizarError
from realizar.replicas.places import Core, Gpu, Place, places_on_cores, places_on_gpus
from realizar.replicas.topology import allowed_cpus, gpu_node, read_cores

COMMAND = (sys.executable, "-m", "realizar.replicas.planning")
_FREE_SHARE = 0.9


class PlannedReplica(msgspec.Struct, frozen=True):
    """A replica's place, its configuration, and whether the engine has to find a context that fits by itself."""

    place: Place
    config: EngineConfig
    fit_context: bool


class ReplicaQuestion(msgspec.Struct, frozen=True):
    """The path of a model, the configuration of each replica, and their number."""

    path: str
    config: EngineConfig
    num_replicas: int


class ReplicaAnswer(msgspec.Struct, frozen=True):
    """The replicas, or why there can't be so many."""

    replicas: tuple[PlannedReplica, ...] = ()
    error: ErrorRecord | None = None


def plan_replicas(path: str, config: EngineConfig, num_replicas: int) -> tuple[PlannedReplica, ...]:
    """Plan the replicas of a model in another process.

    Args:
        config: of each; without a number of threads and a size of the KV cache each gets its share of the machine's.

    Raises:
        CapacityError: they don't fit, or there are too few GPUs.
        RealizarError: the model can't run here.
    """
    question = msgspec.json.encode(ReplicaQuestion(path, config, num_replicas))
    done = subprocess.run(COMMAND, input=question, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise RealizarError(f"the replicas could not be planned: the process ended with {done.returncode}")
    answer = msgspec.json.decode(done.stdout, type=ReplicaAnswer)
    if answer.error is not None:
        raise restore_error(answer.error)
    return answer.replicas


def divide(question: ReplicaQuestion) -> tuple[PlannedReplica, ...]:
    """Plan the replicas in this process; errors as of `plan_replicas`."""
    config, count = question.config, question.num_replicas
    if config.device.startswith("cuda:"):
        raise InvalidRequestError(
            f"--device {config.device} names one GPU, and each replica has its own: use --device cuda", "device"
        )
    checkpoint, cores = find_checkpoint(question.path), read_cores(allowed_cpus())
    if choose_device(config.device).kind == "cuda":
        return _on_gpus(config, count, usable_gpus(gpu_facts()[0]), cores)
    return _on_cores(checkpoint, config, count, cores)


def usable_gpus(facts: Sequence[dict[str, object]]) -> list[Gpu]:
    """The GPUs that can run a model. Args: facts: of `gpu_facts`."""
    usable = [(str(each["device"]), each["bus_id"]) for each in facts if each["fault"] is None]
    return [
        Gpu(int(device.partition(":")[2]), None if bus_id is None else gpu_node(str(bus_id)))
        for device, bus_id in usable
    ]


def _on_gpus(
    config: EngineConfig, count: int, gpus: Sequence[Gpu], cores: Sequence[Core]
) -> tuple[PlannedReplica, ...]:
    if len(gpus) < count:
        raise CapacityError(f"--replicas {count} needs as many GPUs, and {len(gpus)} can run a model here")
    config = replace(config, device="cuda")
    return tuple(PlannedReplica(place, config, fit_context=True) for place in places_on_gpus(gpus, cores, count))


def _on_cores(
    checkpoint: Checkpoint, config: EngineConfig, count: int, cores: Sequence[Core]
) -> tuple[PlannedReplica, ...]:
    memory_bytes = int(read_machine().available_bytes * _FREE_SHARE) // count
    quota = processor_quota()
    planned: list[PlannedReplica] = []
    for place in places_on_cores(cores, count):
        threads = config.threads or max(1, min(len(place.cores), len(cores) if quota is None else int(quota / count)))
        load, _ = plan_within(checkpoint, replace(config, device="cpu", threads=threads), memory_bytes)
        planned.append(PlannedReplica(place, load.config, fit_context=False))
    return tuple(planned)


def main() -> int:
    """Answer the question on stdin; returns the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=ReplicaQuestion)
    try:
        answer = ReplicaAnswer(divide(question))
    except RealizarError as error:
        answer = ReplicaAnswer(error=record_error(error))
    sys.stdout.buffer.write(msgspec.json.encode(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
