"""Models with parts that a backend does not run: commands say so in one plain line, before a weight is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from realizar.backends.cpu.supported import SUPPORTED as ON_CPU
from realizar.backends.cuda.supported import SUPPORTED as ON_CUDA
from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.errors import UnsupportedModelError
from realizar.models.mixers import ShortConvolution
from realizar.models.registry import build_spec
from resolving import resolved
from tiny_model import byte_symbols

HIDDEN, VOCABULARY = 64, 257

_KEYS: dict[str, dict[str, Any]] = {
    "qwen2moe": {
        "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32,
        "expert_shared_feed_forward_length": 32,
    },
    "lfm2": {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3},
    "qwen35": {  # delta nets with heads that are wider than a GPU takes
        "ssm.conv_kernel": 4, "ssm.state_size": 256, "ssm.group_count": 1, "ssm.time_step_rank": 1,
        "ssm.inner_size": 256, "attention.key_length": 16, "attention.recurrent_layers": [True, False, False],
    },
}  # fmt: skip
REASON = "lfm2: layers 0, 2 have a short convolution, which the {} backend does not run"
WIDE_REASON = (
    "qwen35: layer 0 has a gated delta net whose heads have more than 128 features, which the CUDA backend does not run"
)


def _write_model(path: Path, architecture: str) -> None:
    """Three layers of zeros, and a vocabulary of bytes."""
    keys = {
        "block_count": 3,
        "context_length": 64,
        "embedding_length": HIDDEN,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": VOCABULARY,
        **_KEYS[architecture],
    }
    metadata = {
        "general.architecture": architecture,
        **{f"{architecture}.{key}": value for key, value in keys.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*byte_symbols(), "<|end|>"],
        "tokenizer.ggml.token_type": [1] * 256 + [3],
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 256,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    some = StoredTensor("token_embd.weight", GGMLType.F32, (VOCABULARY, HIDDEN), np.zeros(0, np.uint8), path, 0)
    spec = build_spec(Checkpoint(path, "gguf", metadata, {some.name: some}))
    shapes: dict[str, tuple[int, ...]] = {}
    for one in spec.tensors.values():
        shape = one.stored_shape or one.shape
        rows = one.last_out_feature if one.fused else shape[0]
        shapes[one.name] = (max(rows, shapes.get(one.name, (0,))[0]), *shape[1:])
    tensors = [NewTensor(name, GGMLType.F32, shape, np.zeros(shape, "<f4")) for name, shape in shapes.items()]
    write_gguf(path, metadata, tensors)


@pytest.fixture
def unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that no backend runs, where none runs convolutions."""
    path = tmp_path / "lfm2.gguf"
    _write_model(path, "lfm2")
    for module in ("cpu.supported", "cpu.runner", "cpu.plan", "cuda.supported"):
        supported = ON_CUDA if module.startswith("cuda") else ON_CPU
        without = replace(supported, mixers=supported.mixers - {ShortConvolution})
        monkeypatch.setattr(f"realizar.backends.{module}.SUPPORTED", without)
    return path


@pytest.fixture
def not_on_gpu(tmp_path: Path) -> tuple[Path, str]:
    """A file that no GPU runs, and why."""
    path = tmp_path / "qwen35.gguf"
    _write_model(path, "qwen35")
    return path, WIDE_REASON


@pytest.mark.parametrize(
    "words",
    [
        ("run", "MODEL", "hello", "--device", "cpu"),
        ("plan", "MODEL", "--device", "cpu"),
    ],
    ids=lambda words: words[0],
)
def test_commands_for_the_cpu(realizar: Callable[..., Any], unknown: Path, words: tuple[str, ...]) -> None:
    result = realizar(*(unknown if word == "MODEL" else word for word in words))
    assert (result.status, result.stdout) == (1, "")
    assert result.error_lines == [f"realizar: {REASON.format('CPU')}"]


def test_a_plan_for_a_gpu(realizar: Callable[..., Any], not_on_gpu: tuple[Path, str]) -> None:
    pytest.importorskip("torch", reason="a plan for a GPU needs torch")
    result = realizar("plan", not_on_gpu[0], "--device", "cuda", "--memory", "32G")
    assert (result.status, result.stdout) == (1, "")
    assert result.error_lines == [f"realizar: {not_on_gpu[1]}"]


def test_the_cuda_backend(not_on_gpu: tuple[Path, str]) -> None:
    pytest.importorskip("torch", reason="the GPU backend needs torch")
    pytest.importorskip("triton", reason="the GPU backend needs triton")
    from realizar.backends.cuda.device import interpreter_device
    from realizar.backends.cuda.runner import CUDABackend

    checkpoint = open_checkpoint(not_on_gpu[0])
    spec = build_spec(checkpoint)
    with pytest.raises(UnsupportedModelError, match=f"^{not_on_gpu[1]}$"):
        CUDABackend(device=interpreter_device()).load(spec, checkpoint, resolved(spec, None, EngineConfig(), "cuda"))


def test_inspect(realizar: Callable[..., Any], unknown: Path) -> None:
    result = realizar("inspect", unknown)
    assert result.status == 0
    reason = f"{REASON.format('CPU')}; {REASON.format('CUDA')}"
    assert f"will run      no: {reason}" in result.stdout.splitlines()
    found = json.loads(realizar("inspect", unknown, "--json").stdout)
    assert (found["runs"], found["reason"]) == (False, reason)


def test_experts_run_on_the_cpu(realizar: Callable[..., Any], tmp_path: Path) -> None:
    """And `inspect` says that they will. Weights of zero choose the first id."""
    path = tmp_path / "experts.gguf"
    _write_model(path, "qwen2moe")
    lines = realizar("inspect", path).stdout.splitlines()
    assert "will run      yes" in lines
    result = realizar("run", path, "hello", "--device", "cpu", "--max-tokens", "4", "--temperature", "0")
    assert (result.status, result.error_lines) == (0, [])
    assert result.stdout.strip() == "\0\0\0\0"


def test_a_model_for_the_cpu_alone_says_so(realizar: Callable[..., Any], not_on_gpu: tuple[Path, str]) -> None:
    """Nothing refuses it as a whole, but `inspect` names what a GPU lacks, and the CPU runs it."""
    path, reason = not_on_gpu
    assert f"will run      yes, on the CPU alone: {reason}" in realizar("inspect", path).stdout.splitlines()
    found = json.loads(realizar("inspect", path, "--json").stdout)
    assert (found["runs"], found["reason"], found["gpu_reason"]) == (True, None, reason)
    result = realizar("run", path, "hello", "--device", "cpu", "--max-tokens", "2", "--temperature", "0")
    assert (result.status, result.error_lines, result.stdout.strip()) == (0, [], "\0\0")
