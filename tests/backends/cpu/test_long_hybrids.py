"""Hybrids over thousands of tokens on the CPU in float32: against transformers, and the same bits in any chunks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from architectures import MAX_RELATIVE_ERROR, build_case
from cpu_runs import Runner
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.models.registry import build_spec
from wider import wider

torch = pytest.importorskip("torch", reason="parity is against transformers, which needs torch")
pytest.importorskip("transformers", reason="parity is against transformers")

NAMES = ["lfm2", "lfm2moe", "qwen35", "qwen35-two", "qwen35moe", "qwen3next"]
DECODED = 8


@pytest.mark.parametrize(
    ("name", "count"),
    wider([*((name, 5000) for name in NAMES), ("lfm2", 300), ("qwen35", 300)], ("qwen35", 300)),
)
def test_logits_in_any_chunks_and_continued_by_decodes(name: str, count: int, tmp_path: Path) -> None:
    """Chunks of 512, 64, 7 and 1."""
    built = build_case(name, tmp_path, "safetensors")
    checkpoint = open_checkpoint(built.path)
    spec = replace(build_spec(checkpoint), context_length=count)
    tokens = np.random.default_rng(3).integers(0, spec.vocab_size, count).tolist()
    with torch.no_grad():
        expected = built.model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    config = EngineConfig(threads=2, max_running=1, max_step_tokens=512)
    runner = Runner(spec, checkpoint, config)
    found = runner.logits(tokens, (512,) * ((count - DECODED) // 512))
    errors = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert errors.max() <= MAX_RELATIVE_ERROR, f"{errors.max():.2e} at token {errors.argmax()}"
    for size in (64, 7, 1):
        again = runner.logits(tokens, (size,) * ((count - DECODED) // size))
        np.testing.assert_array_equal(again, found)
    runner.close()
