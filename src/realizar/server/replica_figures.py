"""Metrics of replicas: the engines' figures once more, with a label for each replica.

Their names begin otherwise than those of the sums, so that adding up a metric over its labels counts nothing twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from realizar.engine.core.metrics import EngineStats
from realizar.replicas.link import ReplicaLink
from realizar.replicas.replica import ReplicaState
from realizar.server.metrics import COUNTERS, GAUGES, MetricSamples

_Sample = tuple[str, dict[str, str], float]


def replica_samples(link: ReplicaLink, model_name: str) -> tuple[MetricSamples, ...]:
    """The metrics of each replica, as it last said, and of what the router did."""
    replicas = link.replicas
    states: tuple[_Sample, ...] = tuple(
        ("realizar:replica_state", {**_label(model_name, each.name), "state": state}, float(each.state == state))
        for each in replicas
        for state in get_args(ReplicaState)
    )
    moved: tuple[_Sample, ...] = (
        ("realizar:replica_moved_requests_total", {"model_name": model_name}, float(link.num_moved)),
    )
    return (
        MetricSamples("realizar:replica_state", "State of each replica: 1 for the one it is in.", "gauge", states),
        _of_each(
            "requests",
            "Requests that a replica has.",
            "gauge",
            {each.name: len(each.requests) for each in replicas},
            model_name,
        ),
        _of_each(
            "known_blocks",
            "Cached blocks that are known.",
            "gauge",
            {each.name: link.num_keys(each) for each in replicas},
            model_name,
        ),
        MetricSamples(
            "realizar:replica_moved_requests", "Requests that left a dead replica for another.", "counter", moved
        ),
        *engine_samples({each.name: each.stats for each in replicas}, model_name),
    )


def engine_samples(engines: Mapping[str, EngineStats], model_name: str) -> tuple[MetricSamples, ...]:
    """The figures of each engine. Args: engines: by the names of their replicas."""
    return tuple(
        _of_each(stem, text, kind, {each: float(getattr(stats, name)) for each, stats in engines.items()}, model_name)
        for listed, kind in ((GAUGES, "gauge"), (COUNTERS, "counter"))
        for stem, text, name in listed
    )


def _of_each(stem: str, text: str, kind: str, values: Mapping[str, float], model_name: str) -> MetricSamples:
    """One metric. Args: values: by replica."""
    name = f"realizar:replica_{stem}"
    suffix = "_total" if kind == "counter" else ""
    samples: tuple[_Sample, ...] = tuple(
        (name + suffix, _label(model_name, replica), value) for replica, value in values.items()
    )
    return MetricSamples(name, text, kind, samples)


def _label(model_name: str, replica: str) -> dict[str, str]:
    return {"model_name": model_name, "replica": replica}
