"""Metrics for Prometheus, with vLLM's names and bucket edges under our prefix, so that dashboards need one change."""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from realizar.engine.frontend.outputs import RequestOutput
from realizar.engine.stats import EngineStats

CONTENT_TYPE = CONTENT_TYPE_LATEST

_TO_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BETWEEN_TOKENS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
_OF_REQUESTS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
GAUGES = (
    ("num_requests_running", "Choices being generated.", "num_running"),
    ("num_requests_waiting", "Choices waiting for their first step, or again after a preemption.", "num_waiting"),
    ("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", "kv_cache_usage"),
    ("state_snapshots", "Snapshots of states that are kept.", "num_snapshots"),
    ("state_snapshots_on_host", "Snapshots of states that are kept in the host's memory.", "num_host_snapshots"),
    ("kv_cache_size_bytes", "Memory that the KV cache may take.", "kv_cache_bytes"),
    ("engine_resident_memory_bytes", "Memory of the engine's process.", "resident_bytes"),
)
_GAUGES_OF_A_GPU = (
    ("device_memory_used_bytes", "Memory of the GPU that all programs use.", "device_memory_used_bytes"),
    ("device_memory_total_bytes", "Memory of the GPU.", "device_memory_total_bytes"),
)
COUNTERS = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_cache_queries"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_cache_hits"),
    ("state_snapshots_taken", "Snapshots taken of the states of prompts.", "snapshots_taken"),
    ("state_snapshots_restored", "Choices that started from a snapshot.", "snapshots_restored"),
    ("state_snapshots_dropped", "Snapshots that were given up.", "snapshots_dropped"),
    ("state_snapshots_stored", "Snapshots that were moved to the host's memory.", "snapshots_stored"),
    ("state_snapshots_fetched", "Choices that started from a snapshot in the host's memory.", "snapshots_fetched"),
    ("kv_blocks_saved", "Blocks and snapshots written to the cache's folder.", "blocks_saved"),
    ("kv_blocks_fetched", "Blocks and snapshots read from the cache's folder.", "blocks_fetched"),
    ("num_preemptions", "Choices computed again for lack of KV blocks.", "num_preemptions"),
    ("prompt_tokens", "Prompt tokens computed.", "prompt_tokens"),
    ("generation_tokens", "Tokens generated.", "generation_tokens"),
    ("spec_decode_num_drafts", "Times that drafts of a choice were verified.", "num_drafts"),
    ("spec_decode_num_draft_tokens", "Tokens speculated.", "draft_tokens"),
    ("spec_decode_num_accepted_tokens", "Speculated tokens that were right.", "accepted_tokens"),
    ("engine_steps", "Steps of the engine.", "num_steps"),
    ("engine_step_seconds", "Seconds that the engine's steps took.", "step_s"),
    ("engine_restarts", "Engine processes that died and were replaced.", "num_restarts"),
)


class MetricSamples(msgspec.Struct, frozen=True):
    """The samples of one metric: the name, the labels and the value of each."""

    name: str
    text: str
    kind: str
    samples: tuple[tuple[str, dict[str, str], float], ...]

    @classmethod
    def of(cls, name: str, text: str, kind: str, values: Iterable[tuple[dict[str, str], float]]) -> Self:
        """A gauge or a counter, by the labels of its values."""
        sample = f"{name}_total" if kind == "counter" else name
        return cls(name, text, kind, tuple((sample, labels, float(value)) for labels, value in values))

    @classmethod
    def of_states(
        cls, name: str, text: str, states: Sequence[str], owners: Sequence[tuple[dict[str, str], str]]
    ) -> Self:
        """A gauge that is 1 for the state that an owner is in, by the owners' labels."""
        values = [({**labels, "state": state}, state == own) for labels, own in owners for state in states]
        return cls.of(name, text, "gauge", values)


def table_samples(
    prefix: str, kind: str, table: Iterable[tuple[str, str, str]], owners: Sequence[tuple[dict[str, str], object]]
) -> tuple[MetricSamples, ...]:
    """Metrics of a table, by name behind the prefix, text, and attribute of each owner, under the owner's labels."""
    return tuple(
        MetricSamples.of(f"{prefix}{stem}", text, kind, [(labels, getattr(each, name)) for labels, each in owners])
        for stem, text, name in table
    )


def engine_samples(
    prefix: str, engines: Sequence[tuple[dict[str, str], EngineStats]], *, with_gpu: bool = False
) -> tuple[MetricSamples, ...]:
    """The figures of engines, each under its labels; `with_gpu`, those of the GPU too where one has it."""
    on_gpu = with_gpu and any(stats.device_memory_total_bytes for _, stats in engines)
    gauges = table_samples(prefix, "gauge", GAUGES + (_GAUGES_OF_A_GPU if on_gpu else ()), engines)
    name, text = "spec_decode_num_accepted_tokens_per_pos", "Speculated tokens that were right, by place from 0."
    by_place = [
        ({**labels, "position": str(place)}, count)
        for labels, stats in engines
        for place, count in enumerate(stats.accepted_by_place)
    ]
    places = MetricSamples.of(f"{prefix}{name}", text, "counter", by_place)
    return (*gauges, *table_samples(prefix, "counter", COUNTERS, engines), places)


class Metrics:
    """The metrics of one model's requests, with the label `model_name`."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._label = model_name
        self._success = Counter(
            "realizar:request_success",
            "Choices that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._to_first = self._histogram("time_to_first_token_seconds", _TO_FIRST_TOKEN_S, "Arrival to first token.")
        self._between = TokenGaps(
            "realizar:inter_token_latency_seconds", "Between tokens.", _BETWEEN_TOKENS_S, model_name
        )
        self._registry.register(self._between)
        self._whole = self._histogram("e2e_request_latency_seconds", _OF_REQUESTS_S, "Arrival to last token.")
        self._queue = self._histogram("request_queue_time_seconds", _OF_REQUESTS_S, "Waiting for the first step.")
        self._prefill = self._histogram("request_prefill_time_seconds", _OF_REQUESTS_S, "First step to first token.")
        self._decode = self._histogram("request_decode_time_seconds", _OF_REQUESTS_S, "First token to last.")

    def ended(self, output: RequestOutput) -> None:
        timings = output.timings
        for choice in output.outputs:
            self._success.labels(self._label, choice.finish_reason).inc()
        self._to_first.observe(timings.first_token_s - timings.arrival_s)
        self._whole.observe(timings.finished_s - timings.arrival_s)
        self._queue.observe(timings.queue_s)
        self._prefill.observe(timings.prefill_s)
        self._decode.observe(timings.decode_s)

    def tokens_came(self, count: int, gap_s: float) -> None:
        """Count the tokens of a delta, and the time since the previous delta."""
        self._between.add(count, gap_s / count)

    def stopped(self, num_choices: int, to_first_s: float, whole_s: float) -> None:
        """Count a request that was ended because its answers were complete; its waiting time is not known."""
        self._success.labels(self._label, "stop").inc(num_choices)
        self._to_first.observe(to_first_s)
        self._whole.observe(whole_s)
        self._decode.observe(whole_s - to_first_s)

    def aborted(self) -> None:
        self._success.labels(self._label, "abort").inc()

    def samples(self) -> tuple[MetricSamples, ...]:
        return collected(self._registry)

    def _histogram(self, stem: str, buckets: tuple[float, ...], text: str) -> Histogram:
        return Histogram(f"realizar:{stem}", text, ["model_name"], buckets=buckets, registry=self._registry).labels(
            self._label
        )


def collected(registry: CollectorRegistry) -> tuple[MetricSamples, ...]:
    return tuple(
        MetricSamples(
            metric.name,
            metric.documentation,
            metric.type,
            tuple((sample.name, sample.labels, sample.value) for sample in metric.samples),
        )
        for metric in registry.collect()
    )


def add_samples(listed: Iterable[Iterable[MetricSamples]]) -> tuple[MetricSamples, ...]:
    """The metrics of several processes as those of one: values are added, and of times of creation the first counts."""
    sums: dict[str, tuple[MetricSamples, dict[tuple[str, tuple[tuple[str, str], ...]], float]]] = {}
    for metric in (metric for metrics in listed for metric in metrics):
        _, values = sums.setdefault(metric.name, (metric, {}))
        for name, labels, value in metric.samples:
            key = name, tuple(labels.items())
            if key not in values:
                values[key] = value
            elif name.endswith("_created"):
                values[key] = min(values[key], value)
            else:
                values[key] += value
    return tuple(
        MetricSamples(
            metric.name,
            metric.text,
            metric.kind,
            tuple((name, dict(labels), value) for (name, labels), value in values.items()),
        )
        for metric, values in sums.values()
    )


def exposition_of(stats: Mapping[str, EngineStats], metrics: Iterable[MetricSamples]) -> bytes:
    """The metrics of engines and others in Prometheus' text format. Args: stats: by the names of models."""
    registry = CollectorRegistry()
    engines = [({"model_name": name}, each) for name, each in stats.items()]
    registry.register(_SamplesCollector((*engine_samples("realizar:", engines, with_gpu=True), *metrics)))
    return generate_latest(registry)


class _SamplesCollector(Collector):
    def __init__(self, metrics: tuple[MetricSamples, ...]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        for each in self._metrics:
            metric = Metric(each.name, each.text, each.kind)
            for name, labels, value in each.samples:
                metric.add_sample(name, labels, value)
            yield metric


class TokenGaps(Collector):
    """Counts times in buckets. Its samples are those of `prometheus_client.Histogram`, with the label `model_name`.

    That class counts one time at a call; here tokens that came together cost one call. `edges` are the upper edges of
    the buckets, in seconds, ascending; another bucket without an edge follows.
    """

    def __init__(self, name: str, text: str, edges: Sequence[float], model_name: str) -> None:
        self._name, self._text, self._model_name = name, text, model_name
        self._edges = [*edges, math.inf]
        self._counts = [0] * len(self._edges)
        self._sum_s = 0.0
        self._created_s = time.time()

    def add(self, count: int, each_s: float) -> None:
        """Count so many times of `each_s` seconds."""
        self._counts[bisect.bisect_left(self._edges, each_s)] += count
        self._sum_s += count * each_s

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        buckets: list[tuple[str, float]] = []
        total = 0.0
        for edge, count in zip(self._edges, self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if edge == math.inf else str(float(edge)), total))
        family.add_metric([self._model_name], buckets, self._sum_s)
        family.add_sample(f"{self._name}_created", {"model_name": self._model_name}, self._created_s)
        yield family
