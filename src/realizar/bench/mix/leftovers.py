"""A server's gauges once a load is over, and its counters' growth during it, from `/metrics`."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from realizar.bench.serve_client import Target

_PREFIXES = ("realizar:", "vllm:", "llamacpp:")
# A figure's names at realizar and vLLM, and at llama.cpp, which has /metrics with --metrics alone.
_GAUGES: Mapping[str, tuple[str, ...]] = {
    "running": ("num_requests_running", "requests_processing"),
    "waiting": ("num_requests_waiting", "requests_deferred"),
    "kv_cache_share": ("kv_cache_usage_perc", "gpu_cache_usage_perc", "kv_cache_usage_ratio"),
}
_COUNTERS: Mapping[str, tuple[str, ...]] = {
    "prompt_tokens": ("prompt_tokens_total",),
    "output_tokens": ("generation_tokens_total", "tokens_predicted_total"),
    "preemptions": ("num_preemptions_total",),
    "engine_restarts": ("engine_restarts_total",),
}
_WAIT_S = 10.0
_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class ServerState:
    """A server's own figures; those that it does not have are absent.

    Attributes:
        gauges: `running` and `waiting` choices, and the `kv_cache_share` in use, 0 to 1.
        counters: since the server's start, or over a load.
    """

    gauges: Mapping[str, float]
    counters: Mapping[str, float]

    @property
    def is_empty(self) -> bool:
        """Nothing runs, waits or holds blocks."""
        return not any(self.gauges.values())

    def since(self, before: ServerState) -> ServerState:
        """The same, with what the counters have gained."""
        gained = {name: value - before.counters.get(name, 0.0) for name, value in self.counters.items()}
        return ServerState(self.gauges, gained)


def read_state(target: Target) -> ServerState | None:
    """A server's figures; None where it has none to show."""
    address = f"{target.url.rstrip('/').removesuffix('/v1')}/metrics"
    headers = {} if target.api_key is None else {"authorization": f"Bearer {target.api_key}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10) as answer:
            text = answer.read().decode(errors="replace")
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except (OSError, ValueError):
        return None
    sums: dict[str, float] = {}
    for sample in samples:
        for prefix in _PREFIXES:
            if sample.name.startswith(prefix):
                name = sample.name.removeprefix(prefix)
                sums[name] = sums.get(name, 0.0) + sample.value
    gauges, counters = _named(sums, _GAUGES), _named(sums, _COUNTERS)
    return ServerState(gauges, counters) if gauges else None


def wait_until_empty(target: Target) -> ServerState | None:
    """The figures as soon as nothing is left, or after some seconds; None where the server has none."""
    deadline_s = time.monotonic() + _WAIT_S
    while (state := read_state(target)) is not None:
        if state.is_empty or time.monotonic() > deadline_s:
            return state
        time.sleep(_POLL_S)
    return None


def _named(sums: Mapping[str, float], names: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    return {key: sums[name] for key, known in names.items() for name in known if name in sums}
