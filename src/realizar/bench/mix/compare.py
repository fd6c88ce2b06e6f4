"""A mix, or kinds in turn, on one server or on several: first which kinds each of them takes, then rounds in turn."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prometheus_client.parser import text_string_to_metric_families

from realizar.bench.mix.dialects import Dialect, UnknownFieldsError, find_dialect
from realizar.bench.mix.generators import Generators, MixRun
from realizar.bench.mix.requests import MixWork, draw_request
from realizar.bench.serve_client import Target, send_call
from realizar.bench.serve_compare import first_card
from realizar.bench.serve_workload import Lengths
from realizar.errors import InvalidRequestError

# A server's gauges once a load is over, and its counters' growth during it, from `/metrics`.

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
class _ServerState:
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

    def since(self, before: _ServerState) -> _ServerState:
        """The same, with what the counters have gained."""
        gained = {name: value - before.counters.get(name, 0.0) for name, value in self.counters.items()}
        return _ServerState(self.gauges, gained)


def _read_state(target: Target) -> _ServerState | None:
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
    return _ServerState(gauges, counters) if gauges else None


def _wait_until_empty(target: Target) -> _ServerState | None:
    """The figures as soon as nothing is left, or after some seconds; None where the server has none."""
    deadline_s = time.monotonic() + _WAIT_S
    while (state := _read_state(target)) is not None:
        if state.is_empty or time.monotonic() > deadline_s:
            return state
        time.sleep(_POLL_S)
    return None


def _named(sums: Mapping[str, float], names: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    return {key: sums[name] for key, known in names.items() for name in known if name in sums}


Log = Callable[[str], None]
_TRIED_TOKENS = 4
_REFUSALS = (400, 404, 405, 415, 422, 501)
MIX = "mix"


@dataclass(frozen=True, slots=True)
class MixTarget:
    """A server to load.

    Attributes:
        context_tokens: that a request may hold, where it is known.
    """

    target: Target
    dialect: Dialect
    context_tokens: int | None = None


@dataclass(slots=True)
class MixResult:
    """The runs of a server's loads, and what they left.

    Attributes:
        left_out: kinds that were not sent, and why.
        runs: of each label, a kind or `mix`, one a round.
        state: the server's figures after its last load, the counters over its loads; None where it has none.
    """

    server: MixTarget
    left_out: Mapping[str, str] = field(default_factory=dict)
    runs: dict[str, list[MixRun]] = field(default_factory=dict)
    state: _ServerState | None = None


def find_server(target: Target, context_tokens: int | None) -> MixTarget:
    """A server with its dialect, by what its `/v1/models` says of the first model, and its context.

    Args:
        context_tokens: of a request, where the server does not say it.

    Raises:
        InvalidRequestError: the address is none. HubError: the server does not answer.
    """
    card = first_card(target.url, target.api_key)
    length = card.get("max_model_len")
    if isinstance(length, int) and length > 0:
        context_tokens = length
    return MixTarget(target, find_dialect(str(card.get("owned_by", ""))), context_tokens)


def compare_mixes(
    servers: Sequence[MixTarget],
    work: MixWork,
    generators: Generators,
    *,
    alone: Sequence[str] = (),
    rounds: int,
    timeout_s: float,
    log: Log,
) -> list[MixResult]:
    """Put the same load on every server, `rounds` times.

    Args:
        alone: kinds that are sent one after the other, each alone, with `mix` for all of them mixed; without any, the
            mix of `work`.
        log: callback for progress messages.

    Raises:
        InvalidRequestError: a server takes none of the kinds, or does not answer.
    """
    labels = list(dict.fromkeys(alone)) or [MIX]
    kinds = list(dict.fromkeys(kind for label in labels for kind in (work.weights if label == MIX else (label,))))
    results = [_tried(server, work, kinds, timeout_s, log) for server in servers]
    before = [_read_state(result.server.target) for result in results]
    for number in range(rounds):
        for label in labels:
            for result in results:
                _run_once(result, work, label, number, generators, timeout_s, log)
    for result, state in zip(results, before, strict=True):
        after = _wait_until_empty(result.server.target)
        result.state = after.since(state) if after is not None and state is not None else after
    return results


def _run_once(
    result: MixResult, work: MixWork, label: str, number: int, generators: Generators, timeout_s: float, log: Log
) -> None:
    offered = {label: 1.0} if label != MIX else work.weights
    weights = {kind: weight for kind, weight in offered.items() if kind not in result.left_out}
    if not any(weights.values()):
        return
    server = result.server
    log(f"round {number + 1}: {server.target.name}, {label}")
    load = replace(
        work, weights=weights, seed=work.seed + number, salt=label, context_tokens=server.context_tokens
    )  # no load finds the prompts of another in a cache
    result.runs.setdefault(label, []).append(generators.run(server.target, server.dialect, load, label, timeout_s))


def _tried(server: MixTarget, work: MixWork, kinds: Sequence[str], timeout_s: float, log: Log) -> MixResult:
    """Sends one short request of each kind, which also warms the server up; kinds that it refuses are left out."""
    short = replace(
        work, prompt_words=Lengths(4, 4), output_tokens=Lengths(_TRIED_TOKENS, _TRIED_TOKENS), leave_share=0.0
    )
    left_out: dict[str, str] = {}
    for kind in kinds:
        reason = _refusal(server, replace(short, weights={kind: 1.0}, seed=work.seed - 1), timeout_s)
        if reason is not None:
            left_out[kind] = reason
            log(f"{server.target.name} does not take {kind}: {reason}")
    if len(left_out) == len(kinds):
        raise InvalidRequestError(f"{server.target.name} takes none of the kinds: {left_out[kinds[0]]}", "kind")
    return MixResult(server, left_out)


def _refusal(server: MixTarget, work: MixWork, timeout_s: float) -> str | None:
    """The server's reason not to take a kind; None if it takes it.

    Raises:
        InvalidRequestError: it failed otherwise.
    """
    try:
        request = draw_request(work, 0, server.dialect, server.target.model)
    except UnknownFieldsError as error:
        return str(error)
    answered = asyncio.run(send_call(server.target, request.call, time.perf_counter(), timeout_s))
    if answered.error is None:
        return None
    if answered.error.startswith(tuple(f"status {status}" for status in _REFUSALS)):
        return answered.error
    raise InvalidRequestError(f"{server.target.name}: {answered.error}", "url")
