"""What a server says of itself: its first model, and its figures from `/metrics` before and after a load."""

from __future__ import annotations

import json
import time
import urllib.error
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from typing import Any, TypeAlias

from prometheus_client.parser import text_string_to_metric_families

from realizar.bench.serve.client import Server
from realizar.bench.serve.dialects import find_dialect
from realizar.errors import HubError, InvalidRequestError

_PREFIXES = ("realizar:", "vllm:", "sglang:", "llamacpp:")
# A figure's names at realizar and vLLM, SGLang and llama.cpp; the last two have /metrics only if they are asked to.
_GAUGES: Mapping[str, tuple[str, ...]] = {
    "running": ("num_requests_running", "num_running_reqs", "requests_processing"),
    "waiting": ("num_requests_waiting", "num_queue_reqs", "requests_deferred"),
    "kv_cache_share": ("kv_cache_usage_perc", "gpu_cache_usage_perc", "token_usage", "kv_cache_usage_ratio"),
}
_COUNTERS: Mapping[str, tuple[str, ...]] = {
    "prompt_tokens": ("prompt_tokens_total",),
    "output_tokens": ("generation_tokens_total", "tokens_predicted_total"),
    "preemptions": ("num_preemptions_total",),
    "engine_restarts": ("engine_restarts_total",),
}
_OF_REPLICAS: Mapping[str, tuple[str, ...]] = {
    "prompt_tokens": ("replica_prompt_tokens_total",),
    "cached_tokens": ("replica_prefix_cache_hits_total",),
    "output_tokens": ("replica_generation_tokens_total",),
}
_WAIT_S = 10.0
_POLL_S = 0.25

Counts: TypeAlias = Mapping[str, float]


def find_server(server: Server) -> Server:
    """The server with its first model, if none is named, its dialect, and its context, by what its `/v1/models` says.

    It raises InvalidRequestError if the address is none, and HubError if no model is named and the server names none.
    """
    try:
        card = _first_card(server)
    except HubError:
        if not server.model:
            raise
        return server
    length = card.get("max_model_len")
    return replace(
        server,
        model=server.model or card["id"],
        dialect=find_dialect(str(card.get("owned_by", ""))),
        context_tokens=length if isinstance(length, int) and length > 0 else server.context_tokens,
    )


def _first_card(server: Server) -> dict[str, Any]:
    """The first entry of a server's list of models; `id` is the model's name."""
    if not server.url.startswith(("http://", "https://")):
        raise InvalidRequestError(f"a server's address starts with http:// or https://, not {server.url}", "url")
    try:
        card: dict[str, Any] = dict(json.loads(server.get("/v1/models"))["data"][0])
        card["id"] = str(card["id"])
    except urllib.error.HTTPError as error:
        raise HubError(f"{server.url} names no model (status {error.code}); name it with --model") from None
    except OSError as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        text = reason.strerror if isinstance(reason, OSError) and reason.strerror else reason
        raise HubError(f"{server.url} does not answer: {text}") from None
    except (ValueError, LookupError, TypeError, HTTPException) as reason:
        raise HubError(f"{server.url} names no model ({reason}); name it with --model") from None
    return card


@dataclass(frozen=True, slots=True)
class ServerState:
    """A server's own figures; those that it does not have are absent.

    Attributes:
        gauges: `running` and `waiting` choices, and the `kv_cache_share` in use, 0 to 1.
        counters: since the server's start, or over a load.
        replicas: tokens of prompts, those of them that its cache had, and tokens generated, by each replica's name.
    """

    gauges: Counts = field(default_factory=dict)
    counters: Counts = field(default_factory=dict)
    replicas: Mapping[str, Counts] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> ServerState:
        """The figures in Prometheus' text form. It raises ValueError if the text is malformed."""
        sums: dict[str, dict[str, float]] = {"": {}}  # by replica
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if prefix := next((each for each in _PREFIXES if sample.name.startswith(each)), None):
                    name = sample.name.removeprefix(prefix)
                    of = sums.setdefault(sample.labels.get("replica", ""), {})
                    of[name] = of.get(name, 0.0) + sample.value
        whole = sums.pop("")
        replicas = {name: _named(found, _OF_REPLICAS) for name, found in sums.items()}
        return cls(_named(whole, _GAUGES), _named(whole, _COUNTERS), replicas)

    @property
    def is_empty(self) -> bool:
        return not any(self.gauges.values())

    def since(self, before: ServerState) -> ServerState:
        replicas = {name: _gained(each, before.replicas.get(name, {})) for name, each in self.replicas.items()}
        return ServerState(self.gauges, _gained(self.counters, before.counters), replicas)


def _named(sums: Counts, names: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    return {key: sums[name] for key, known in names.items() for name in known if name in sums}


def _gained(after: Counts, before: Counts) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def read_state(server: Server) -> ServerState | None:
    try:
        state = ServerState.parse(server.get("/metrics").decode(errors="replace"))
    except (OSError, ValueError, HTTPException):
        return None
    return state if state.gauges or state.replicas else None


def wait_until_empty(server: Server) -> ServerState | None:
    """The figures as soon as nothing is left, or after some seconds; None where the server has none."""
    deadline_s = time.monotonic() + _WAIT_S
    while (state := read_state(server)) is not None:
        if state.is_empty or time.monotonic() > deadline_s:
            return state
        time.sleep(_POLL_S)
    return None
