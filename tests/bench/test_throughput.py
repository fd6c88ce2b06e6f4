"""Rows of a mixture read as many experts as rows with texts of their own do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from realizar.bench.throughput import Work, measure_throughput
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.models.generated.generate import generate_gguf
from realizar.models.generated.shapes import SHAPES


def test_random_rows_read_experts_by_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = dataclasses.replace(SHAPES["tiny-moe"], num_layers=8, num_experts=64, experts_per_token=4, vocab_size=4096)
    monkeypatch.setitem(SHAPES, "tiny-moe", shape)
    path = tmp_path / "model.gguf"
    generate_gguf("tiny-moe", path, "q4_k_m")
    config = EngineConfig(device="cpu", prefix_cache=False)
    results = measure_throughput(open_checkpoint(path), config, Work(4, 24, (1, 8, 32), 1), log=lambda _: None)
    assert [result.experts_by_chance for result in results] == pytest.approx([4, 25.8, 55.9], abs=0.05)
    for result in results:
        assert result.experts_read == pytest.approx(result.experts_by_chance, rel=0.05)
