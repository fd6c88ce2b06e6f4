"""The speeds of fetching and computing: measured at load, kept for plans, and what is decided by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from realizar.backends.cpu.kv.memory import KVSizes
from realizar.backends.cpu.state.sizes import state_sizes
from realizar.backends.select import resolve_model
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.engine.fetch_speed import FetchSpeed, keep_speed, known_speed
from realizar.engine.loading import load_core
from realizar.hub.folders import user_cache
from realizar.kv_cache.snapshot_tiers import SnapshotCounts
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.scheduler import SchedulerCounts
from step_inputs import TokenOutput, stepped
from tiny_model import write_tiny_model

OPTIONS: dict[str, Any] = {
    "threads": 1,
    "context_length": 512,
    "max_running": 2,
    "kv_cache_bytes": 8 << 20,
    "device": "cpu",
}


@pytest.fixture
def hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "hybrid.gguf"
    write_tiny_model(path, shape="tiny-delta")
    return path


def test_a_load_measures_both_speeds_and_keeps_them(hybrid: Path) -> None:
    checkpoint = open_checkpoint(hybrid)
    core = load_core(checkpoint, EngineConfig(**OPTIONS, host_snapshot_bytes=4 << 20))
    speed = known_speed(hybrid, core.config)
    assert speed is not None
    assert speed.snapshot_bytes == state_sizes(core.spec, 0).slot_bytes
    assert core.cache.least_fetched_tokens == speed.least_tokens >= 1
    assert not core.has_work
    assert all(group.used == group.cached == 0 for group in core.cache.counts)
    total, on_host = core.capacity.num_snapshots, core.capacity.num_host_snapshots
    assert core.cache.snapshots.counts == SnapshotCounts(total=total, host_total=on_host)
    assert core.scheduler.counts == SchedulerCounts(0, 0, 0)  # what was read to measure is nobody's request
    core.audit()
    core.close()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"host_snapshot_bytes": 100}, "host_snapshot_bytes is 100"),
        ({"host_snapshot_bytes": 4 << 20, "prefix_cache": False}, "the cache has none to store"),
    ],
)
def test_a_load_says_why_no_snapshot_waits_on_the_host(
    hybrid: Path, options: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    core = load_core(open_checkpoint(hybrid), EngineConfig(**OPTIONS, **options))
    (message,) = [each.getMessage() for each in caplog.records if "waits in the host's memory" in each.getMessage()]
    assert why in message
    assert core.cache.least_fetched_tokens == 1
    core.close()


def test_a_load_says_that_no_prefix_is_cached(hybrid: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where the KV cache has room for a request and none for a snapshot; it was turned off without a word."""
    roomy = load_core(open_checkpoint(hybrid), EngineConfig(**OPTIONS))
    assert "prefixes are not cached" not in caplog.text
    request_bytes = KVSizes(roomy.spec, roomy.config).request_bytes
    roomy.close()
    core = load_core(open_checkpoint(hybrid), EngineConfig(**OPTIONS | {"kv_cache_bytes": request_bytes + 1000}))
    assert core.capacity.num_snapshots == 0
    assert "prefixes are not cached: a snapshot of the model's states takes" in caplog.text
    core.close()


@pytest.mark.parametrize("max_running", [1, 2])
def test_conversations_in_turn_find_their_prefixes(hybrid: Path, max_running: int) -> None:
    """The blocks of ended requests have all of `kv_cache_bytes`, however few requests may run at once."""
    core = load_core(open_checkpoint(hybrid), EngineConfig(**OPTIONS | {"max_running": max_running}))
    for turn in range(3):
        for talk in range(4):
            prompt = tuple((place * 7 + talk) % 200 for place in range(400))
            request = Request(f"{turn} {talk}", prompt, SamplingParams(temperature=0.0), 4, prompt_marks=(300, 399))
            core.add(request)
            outputs: list[TokenOutput] = []
            while core.has_work:
                outputs += stepped(core)
            assert outputs[0].num_cached_tokens == (384 if turn else 0)
    core.audit()
    core.close()


def test_nothing_is_measured_without_snapshots_on_the_host(hybrid: Path) -> None:
    core = load_core(open_checkpoint(hybrid), EngineConfig(**OPTIONS))
    assert core.cache.least_fetched_tokens == 1
    assert known_speed(hybrid, core.config) is None
    core.close()


@pytest.mark.parametrize(("fetch_s", "tokens_per_s", "tokens"), [(0.0015, 24_000, 36), (1e-6, 100, 1), (2.0, 50, 100)])
def test_the_tokens_from_which_on_fetching_is_faster(fetch_s: float, tokens_per_s: float, tokens: int) -> None:
    assert FetchSpeed(fetch_s, 1, tokens_per_s).least_tokens == tokens


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"fetch_s": "x", "snapshot_bytes": 1, "tokens_per_s": 1}',
        '{"fetch_s": 0, "snapshot_bytes": 1, "tokens_per_s": 1}',
    ],
)
def test_a_record_that_is_none_is_not_known(hybrid: Path, text: str) -> None:
    config = resolve_model(open_checkpoint(hybrid), EngineConfig(**OPTIONS))[1]
    keep_speed(hybrid, config, FetchSpeed(1.0, 2, 3.0))
    assert known_speed(hybrid, config) == FetchSpeed(1.0, 2, 3.0)
    (kept,) = (user_cache() / "fetch-speeds").iterdir()
    kept.write_text(text)
    assert known_speed(hybrid, config) is None
