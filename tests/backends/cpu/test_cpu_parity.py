"""Every architecture, from safetensors and from GGUF, through the CPU backend, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from architecture_case import Form
from architectures import build_case, check_logits, rows_run_by
from cpu_runs import load_runner
from realizar.config import EngineConfig

pytest.importorskip("torch", reason="parity is against transformers, which needs torch")
pytest.importorskip("transformers", reason="parity is against transformers")


@pytest.mark.parametrize(("name", "form"), rows_run_by("cpu"))
def test_cpu_logits_agree_with_transformers(name: str, form: Form, tmp_path: Path) -> None:
    """Chunks of 5, 1 and 7 tokens, then token by token, past windows and rope switches."""
    built = build_case(name, tmp_path, form)
    config = EngineConfig(threads=2, block_size=32, max_step_tokens=64, max_running=2)
    runner = load_runner(built.path, config, built.context_length)
    assert runner.capacity.kv_cache_dtype == "f32"
    check_logits(built, lambda ids: runner.logits(ids, (5, 1, 7)))
    runner.close()


def test_experts_saved_as_one_tensor(tmp_path: Path) -> None:
    """Gate and up of all experts are one tensor, of which the backend packs the out_features of each."""
    built = build_case("qwen3moe", tmp_path, "safetensors")
    fused = built._replace(path=tmp_path / "fused")
    built.model.save_pretrained(fused.path, save_original_format=False)
    config = EngineConfig(threads=2, block_size=32, max_step_tokens=64, max_running=2, device="cpu")
    runner = load_runner(fused.path, config, built.context_length)
    check_logits(fused, runner.logits)
    runner.close()
