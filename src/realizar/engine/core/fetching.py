"""`measure_fetching` finds where a snapshot in the host's memory is fetched sooner than what it saves is computed."""

from __future__ import annotations

import logging
import time

from realizar.backends.base import Backend, FetchesSnapshots
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.fetch_speed import FetchSpeed
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.sizes import format_bytes

_LOG = logging.getLogger(__name__)
_MOST_TOKENS = 2048  # of the prompt that is measured


def measure_fetching(core: EngineCore, backend: Backend) -> FetchSpeed | None:
    """Measure a backend that nobody uses yet, and have its engine decide by that; None if it has no host snapshots.

    The prompts are read by another engine, so that none of them is in this one's figures.
    """
    if not isinstance(backend, FetchesSnapshots) or not core.spec.state_layers():
        return None
    if not core.capacity.num_host_snapshots:
        _warn_of_cache(core, backend.snapshot_bytes)
        _warn_of_host(core, backend.snapshot_bytes)
        return None
    count = min(_MOST_TOKENS, core.capacity.max_step_tokens, core.max_request_tokens - 1)
    prompt = tuple(place * 7919 % core.spec.vocab_size for place in range(count))
    reader = EngineCore(backend, core.spec, core.config)
    seconds = min(_read(reader, prompt, salt) for salt in ("first", "second"))  # the first may compile
    found = FetchSpeed(backend.time_fetch(), backend.snapshot_bytes, count / seconds)
    core.cache.least_fetched_tokens = found.least_tokens
    on_host = core.capacity.num_host_snapshots
    size = format_bytes(on_host * backend.snapshot_bytes)
    _LOG.info("up to %d snapshots of states wait in %s of the host's memory, %s", on_host, size, found)
    return found


def _warn_of_cache(core: EngineCore, snapshot_bytes: int) -> None:
    """Say why no prompt starts from an earlier one's beginning, where that was not turned off."""
    if core.config.prefix_cache and not core.capacity.num_snapshots:
        _LOG.warning(
            "prefixes are not cached: a snapshot of the model's states takes %s, and the KV cache has no room for one"
            " beside a request of %d tokens; raise kv_cache_bytes or lower the context length",
            format_bytes(snapshot_bytes),
            core.capacity.context_length,
        )


def _warn_of_host(core: EngineCore, snapshot_bytes: int) -> None:
    """Say why no snapshot waits in the host's memory, where that was asked for."""
    given = core.config.host_snapshot_bytes
    if not given:
        return
    why = "the cache has none to store"
    if core.capacity.num_snapshots:
        why = f"one takes {format_bytes(snapshot_bytes)}, and host_snapshot_bytes is {format_bytes(given)}"
    _LOG.warning("no snapshot of a state waits in the host's memory: %s", why)


def _read(core: EngineCore, prompt: tuple[int, ...], salt: str) -> float:
    started_s = time.perf_counter()
    core.add(Request(f"measure-{salt}", prompt, SamplingParams(temperature=0.0), 1, cache_salt=f"measure-{salt}"))
    while core.has_work:
        core.step()
    return time.perf_counter() - started_s
