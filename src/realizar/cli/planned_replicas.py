"""What `realizar plan --replicas` shows beside the figures of one engine."""

from __future__ import annotations

from collections.abc import Sequence

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.models.registry import build_spec
from realizar.replicas.planning import PlannedReplica, ReplicaQuestion, divide


def replicas_here(
    checkpoint: Checkpoint, config: EngineConfig, count: int, memory_bytes: int | None
) -> tuple[PlannedReplica, ...]:
    """The replicas as `realizar serve` would start them.

    Args:
        config, memory_bytes: as in `ReplicaQuestion`.

    Raises:
        RealizarError: as of `plan_replicas`.
    """
    return divide(ReplicaQuestion(str(checkpoint.path), config, count, memory_bytes))


def least_of(planned: Sequence[PlannedReplica]) -> PlannedReplica:
    """The replica with the least memory, which bounds what a request may take."""
    return min(planned, key=lambda each: each.memory_bytes)


def replica_facts(planned: PlannedReplica) -> dict[str, object]:
    """A replica for JSON."""
    gpu = planned.place.gpu
    return {
        "device": "cpu" if gpu is None else f"cuda:{gpu.index}",
        "cpus": planned.place.cpus,
        "cores_are_shared": planned.place.is_shared,
        "threads": planned.config.threads,
        "context_length": planned.config.context_length,
        "memory_bytes": planned.memory_bytes,
        "needed_bytes": planned.needed_bytes,
    }


def replica_lines(checkpoint: Checkpoint, planned: Sequence[PlannedReplica], *, context_given: bool) -> list[str]:
    """Lines for people. Args: context_given: the user chose the context."""
    lines = [f"replica {number:<4} {each.label}" for number, each in enumerate(planned)]
    own, fitting = build_spec(checkpoint).context_length, least_of(planned).config.context_length
    if fitting is not None and fitting < own and not context_given:
        lines.append(f"context      {fitting} tokens a request, as the model's {own} do not fit")
    return lines
