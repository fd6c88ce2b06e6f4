"""`measure_fetching` finds where a snapshot in the host's memory is fetched sooner than what it saves is computed."""

from __future__ import annotations

import logging
import time

from realizar.backends.base import FetchesSnapshots
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.fetch_speed import FetchSpeed
from realizar.request import Request
from realizar.sampling_params import SamplingParams

_LOG = logging.getLogger(__name__)
_MOST_TOKENS = 2048  # of the prompt that is measured


def measure_fetching(core: EngineCore, backend: object) -> FetchSpeed | None:
    """Measure an engine that nothing else uses yet, and have it decide by that; None if it has no host snapshots."""
    if not core.capacity.num_host_snapshots or not isinstance(backend, FetchesSnapshots):
        return None
    count = min(_MOST_TOKENS, core.capacity.max_step_tokens, core.max_request_tokens - 1)
    prompt = tuple(place * 7919 % core.spec.vocab_size for place in range(count))
    seconds = min(_read(core, prompt, salt) for salt in ("first", "second"))  # the first may compile
    core.clear_cache()
    found = FetchSpeed(backend.time_fetch(), backend.snapshot_bytes, count / seconds)
    core.cache.least_fetched_tokens = found.least_tokens
    _LOG.info("snapshots in the host's memory are %s", found)
    return found


def _read(core: EngineCore, prompt: tuple[int, ...], salt: str) -> float:
    """Seconds in which a prompt is read."""
    started_s = time.perf_counter()
    core.add(Request(f"measure-{salt}", prompt, SamplingParams(temperature=0.0), 1, cache_salt=f"measure-{salt}"))
    while core.has_work:
        core.step()
    return time.perf_counter() - started_s
