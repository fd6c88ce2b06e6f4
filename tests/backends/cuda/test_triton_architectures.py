"""Architectures with layers unlike others, and mixtures, through the whole GPU backend, interpreted."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
pytest.importorskip("transformers", reason="parity is against transformers")
pytest.importorskip("gguf", reason="conversion needs gguf")

from architecture_case import Form
from architectures import build_case, check_logits
from backends.cuda.cuda_runs import load_gpu_runner
from realizar.config import EngineConfig
from wider import wider

IN_FILES = (
    "smollm3", "arcee", "minimax-m2", "glm4moe", "gemma4", "gemma4-e", "gemma4-moe", "lfm2", "mistral3", "qwen35",
    *("gpt-oss", "glm4", "glm4v"),
)  # fmt: skip
ROWS = [*((name, "gguf") for name in IN_FILES), ("gpt-oss", "safetensors"), ("qwen35-uneven", "safetensors")]


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # GELU of a gate far below zero, which is 0
@pytest.mark.parametrize(("name", "form"), wider(ROWS, ("arcee", "gguf"), ("gemma4-e", "gguf"), ("qwen35", "gguf")))
def test_architectures(name: str, form: Form, tmp_path: Path) -> None:
    """A chunk and one token: through a layer without rope and the one after it, through routers of sigmoids,
    through experts whose gate and up alternate in a file, through a rope of neighbours in half a head, through layers
    with a state, or with inputs of their own and keys of another, and with queries that grow."""
    built = build_case(name, tmp_path, form)
    config = EngineConfig(threads=1, max_running=1, max_step_tokens=32, kv_cache_bytes=8 << 20, context_length=64)
    runner = load_gpu_runner(built.path, config, 64)
    count = 18 if name == "mistral3" else 6  # past its original context
    check_logits(built._replace(token_ids=built.token_ids[:count]), lambda ids: runner.logits(ids, (count - 1,)))
    runner.close()
