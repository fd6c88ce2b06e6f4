"""`realizar plan` against what loading comes to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from realizar.checkpoint.open import open_checkpoint
from realizar.cli.main import app, run_app
from realizar.config import EngineConfig
from realizar.engine.loading import load_core


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run_app(app, ["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("model", ["smollm2_path", "gemma3_path"])
def test_sizes_are_those_of_loading(
    model: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gemma has two cache groups, one of them a window."""
    path = request.getfixturevalue(model)
    planned = plan(capsys, str(path), "--device", "cpu", "--context-length", "3000", "--kv-cache-bytes", "1G")
    assert [each["context_length"] for each in planned["contexts"]] == [512, 1024, 2048, 3000]
    longest = planned["contexts"][-1]
    config = EngineConfig(device="cpu", context_length=3000, max_running=1, kv_cache_bytes=1 << 30)
    core = load_core(open_checkpoint(path), config)
    try:
        capacity = core.capacity
        assert planned["weight_bytes"] == capacity.weight_bytes
        assert planned["kv_dtype"] == capacity.kv_cache_dtype
        assert longest["request_bytes"] == capacity.kv_cache_bytes
    finally:
        core.close()
    assert longest["num_requests"] == (1 << 30) // longest["request_bytes"]
    counts = [each["num_requests"] for each in planned["contexts"]]
    assert counts == sorted(counts, reverse=True)


def test_report(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, ["plan", str(smollm2_path), "--device", "cpu", "--memory", "100M", "--max-running", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("weights      92.0 MiB packed")
    assert lines[2] == "KV cache     22.5 KiB a token of f16, 40.0 MiB at most", (
        "30 layers of 3 heads of 64 in f16, twice"
    )
    assert "do not fit" in lines[3]
    assert lines[6].split() == ["512", "12.0", "MiB", "2", "(room", "for", "3)"]
    assert lines[-1].split() == ["8192", "180.7", "MiB", "none"]
