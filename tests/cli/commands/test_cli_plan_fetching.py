"""`realizar plan` of a model with snapshots in the host's memory, before and after it was loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from realizar.backends.select import resolve_model
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.engine.fetch_speed import FetchSpeed, keep_speed
from tiny_model import write_tiny_model

WORDS = ("--device", "cpu", "--host-snapshot-bytes", "4M", "--kv-cache-bytes", "8M", "--context-length", "512")


def test_a_plan_shows_what_was_measured(
    tmp_path: Path, realizar: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "hybrid.gguf"
    write_tiny_model(path, shape="tiny-delta")
    before = realizar("plan", path, *WORDS)
    assert "where that is faster than computing: as measured at the first load" in before.stdout
    assert json.loads(realizar("plan", path, *WORDS, "--json").stdout)["fetch_speed"] is None
    _, config = resolve_model(open_checkpoint(path), EngineConfig(device="cpu"))
    speed = FetchSpeed(0.001, 2_000_000, 24_000.0)
    keep_speed(path, config, speed)
    assert "fetched in 1 ms (2 GB/s), as 24 tokens at 24,000/s are computed" in realizar("plan", path, *WORDS).stdout
    found = json.loads(realizar("plan", path, *WORDS, "--json").stdout)["fetch_speed"]
    assert FetchSpeed(**found) == speed
