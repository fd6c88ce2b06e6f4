"""Figures of an engine, and their sum over engines that followed each other."""

from __future__ import annotations

from dataclasses import fields

import pytest

from realizar.engine.stats import EngineStats

MEMORY = {
    "num_snapshots",
    "num_host_snapshots",
    "device_memory_used_bytes",
    "device_memory_total_bytes",
    "kv_cache_bytes",
    "resident_bytes",
}
MOMENTARY = {"num_running", "num_waiting", "num_used_blocks", "num_blocks", *MEMORY}


def test_counts_go_on_and_figures_of_the_moment_do_not() -> None:
    names = [field.name for field in fields(EngineStats) if field.name != "accepted_by_place"]
    now = EngineStats(**dict(zip(names, range(1, len(names) + 1), strict=True)), accepted_by_place=(5, 2))
    before = EngineStats(**dict(zip(names, range(100, 100 + len(names)), strict=True)), accepted_by_place=(7, 4, 1))
    both = now.plus(before)
    assert both.accepted_by_place == (12, 6, 1)
    for name in names:
        mine, earlier = getattr(now, name), getattr(before, name)
        assert getattr(both, name) == (mine if name in MOMENTARY else mine + earlier)
    assert now.plus(EngineStats()) == now


def test_usage_is_a_share_of_the_blocks() -> None:
    assert EngineStats(num_used_blocks=3, num_blocks=12).kv_cache_usage == pytest.approx(0.25)
    assert EngineStats().kv_cache_usage == 0
