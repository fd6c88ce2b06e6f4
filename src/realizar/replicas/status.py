"""`ReplicaStatus`: one replica as metrics and lists show it."""

from __future__ import annotations

from dataclasses import dataclass

from realizar.engine.core.metrics import EngineStats
from realizar.replicas.replica import Replica, ReplicaState


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica.

    Attributes:
        pid: of its engine's process; 0 while none is ready.
        stats: as it last said; counts go on over restarts.
        num_requests: that it has.
        num_keys: blocks of its prefix cache that the router knows.
    """

    name: str
    state: ReplicaState
    pid: int
    stats: EngineStats
    num_requests: int
    num_keys: int


def status_of(replica: Replica, num_keys: int) -> ReplicaStatus:
    """A replica's status now."""
    pid = replica.info.pid if replica.info is not None and replica.is_alive else 0
    return ReplicaStatus(replica.name, replica.state, pid, replica.stats, len(replica.requests), num_keys)
