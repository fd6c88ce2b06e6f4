"""Metrics of replicas: the engines' figures once more, with a label for each replica.

Their names begin otherwise than those of the sums, so that adding up a metric over its labels counts nothing twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from realizar.replicas.link import ReplicaLink
from realizar.replicas.replica import ReplicaState
from realizar.server.metrics import COUNTERS, GAUGES, MetricSamples

_Sample = tuple[str, dict[str, str], float]


def replica_samples(link: ReplicaLink, model_name: str) -> tuple[MetricSamples, ...]:
    """The metrics of each replica, as it last said, and of what the router did."""
    statuses = link.statuses()

    def label(replica: str) -> dict[str, str]:
        return {"model_name": model_name, "replica": replica}

    def of_each(stem: str, text: str, kind: str, values: Sequence[float]) -> MetricSamples:
        name = f"realizar:replica_{stem}"
        suffix = "_total" if kind == "counter" else ""
        pairs = zip(statuses, values, strict=True)
        samples: tuple[_Sample, ...] = tuple((name + suffix, label(each.name), value) for each, value in pairs)
        return MetricSamples(name, text, kind, samples)

    figures = [
        of_each(stem, text, kind, [float(getattr(each.stats, name)) for each in statuses])
        for listed, kind in ((GAUGES, "gauge"), (COUNTERS, "counter"))
        for stem, text, name in listed
    ]
    states: tuple[_Sample, ...] = tuple(
        ("realizar:replica_state", {**label(each.name), "state": state}, float(each.state == state))
        for each in statuses
        for state in get_args(ReplicaState)
    )
    moved: tuple[_Sample, ...] = (
        ("realizar:replica_moved_requests_total", {"model_name": model_name}, float(link.num_moved)),
    )
    return (
        MetricSamples("realizar:replica_state", "State of each replica: 1 for the one it is in.", "gauge", states),
        of_each("requests", "Requests that a replica has.", "gauge", [each.num_requests for each in statuses]),
        of_each("known_blocks", "Cached blocks that are known.", "gauge", [each.num_keys for each in statuses]),
        MetricSamples(
            "realizar:replica_moved_requests", "Requests that left a dead replica for another.", "counter", moved
        ),
        *figures,
    )
