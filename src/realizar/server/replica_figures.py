"""Metrics of replicas: the engines' figures once more, with a label for each replica.

Their names begin otherwise than those of the sums, so that adding up a metric over its labels counts nothing twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from realizar.engine.stats import EngineStats
from realizar.replicas.link import ReplicaLink
from realizar.replicas.replica import ReplicaState
from realizar.server.metrics import MetricSamples, engine_samples

_PREFIX = "realizar:replica_"


def replica_samples(link: ReplicaLink, model_name: str) -> tuple[MetricSamples, ...]:
    """The metrics of each replica, as it last said, and of what the router did."""
    replicas = [(_labels(model_name, each.name), each) for each in link.replicas]
    state_text, states = "State of each replica: 1 for the one it is in.", get_args(ReplicaState)
    requests = [(labels, len(each.requests)) for labels, each in replicas]
    blocks = [(labels, link.num_keys(each)) for labels, each in replicas]
    moved = [({"model_name": model_name}, link.num_moved)]
    return (
        MetricSamples.of_states(
            f"{_PREFIX}state", state_text, states, [(labels, each.state) for labels, each in replicas]
        ),
        MetricSamples.of(f"{_PREFIX}requests", "Requests that a replica has.", "gauge", requests),
        MetricSamples.of(f"{_PREFIX}known_blocks", "Cached blocks that are known.", "gauge", blocks),
        MetricSamples.of(
            f"{_PREFIX}moved_requests", "Requests that left a dead replica for another.", "counter", moved
        ),
        *samples_of_engines({each.name: each.stats for each in link.replicas}, model_name),
    )


def samples_of_engines(engines: Mapping[str, EngineStats], model_name: str) -> tuple[MetricSamples, ...]:
    """The figures of each engine. Args: engines: by the names of their replicas."""
    return engine_samples(_PREFIX, [(_labels(model_name, name), stats) for name, stats in engines.items()])


def _labels(model_name: str, replica: str) -> dict[str, str]:
    return {"model_name": model_name, "replica": replica}
