"""Sizes beyond what the machine has are refused by name, before weights are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from realizar.backends.cpu.plan import plan_memory
from realizar.backends.cpu.runner import CPUBackend
from realizar.backends.select import resolve_model
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.errors import InvalidRequestError
from tiny_model import write_tiny_model


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_step_tokens", 1 << 20), ("kv_cache_bytes", 100 << 40)],
)
def test_more_than_the_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: int) -> None:
    for module in ("workspace", "kv.memory"):
        monkeypatch.setattr(f"realizar.backends.cpu.{module}.memory_bytes", lambda: 1 << 30)
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path)
    checkpoint = open_checkpoint(path)
    backend = CPUBackend()
    spec, config = resolve_model(checkpoint, replace(EngineConfig(device="cpu"), **{name: value}))
    with pytest.raises(InvalidRequestError, match=f"{name} of .* memory") as refused:
        backend.load(spec, checkpoint, config)
    assert refused.value.param == name
    backend.shutdown()


def test_a_step_has_a_bound_on_any_machine() -> None:
    with pytest.raises(InvalidRequestError, match="max_step_tokens must be between 1 and 1048576, not 1000000000"):
        EngineConfig(max_step_tokens=1_000_000_000)


def test_a_plan_for_a_larger_machine_is_not_compared_with_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("plan", "kv.memory"):
        monkeypatch.setattr(f"realizar.backends.cpu.{module}.memory_bytes", lambda: 1 << 30)
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path)
    checkpoint = open_checkpoint(path)
    spec, config = resolve_model(checkpoint, EngineConfig(device="cpu", kv_cache_bytes=4 << 30))
    assert plan_memory(spec, checkpoint, config, free_bytes=64 << 30).kv_limit_bytes == 4 << 30
    with pytest.raises(InvalidRequestError, match=r"kv_cache_bytes of .* memory"):
        plan_memory(spec, checkpoint, config)
