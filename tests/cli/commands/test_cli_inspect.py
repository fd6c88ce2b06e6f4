"""`realizar inspect`: what it shows, and whether a model will run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantization.stored_checkpoints import Stored, write_model, write_model_opt_file
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.gguf_writer import NewTensor, write_gguf


def inspected(realizar: Callable[..., Any], path: Path) -> dict[str, Any]:
    result = realizar("inspect", path, "--json")
    assert result.status == 0, result.stderr
    record: dict[str, Any] = json.loads(result.stdout)
    return record


def test_a_real_model_runs_and_shows_everything(realizar: Callable[..., Any], smollm2_path: Path) -> None:
    record = inspected(realizar, smollm2_path)
    assert record["runs"] is True
    assert record["reason"] is None
    assert record["architecture"] == "llama"
    assert len(record["tensors"]) == 272
    assert sum(tensor["size_bytes"] for tensor in record["tensors"]) == record["tensor_bytes"] == 96_576_768
    assert record["size_bytes"] == smollm2_path.stat().st_size == 98_362_432
    assert record["types"]["Q4_1"]["tensors"] > 200
    assert record["metadata"]["llama.block_count"] == 30
    assert record["metadata"]["tokenizer.ggml.tokens"] == {"length": 49152}
    assert "<|im_start|>" in record["chat_template"]

    text = realizar("inspect", smollm2_path).stdout
    assert "will run      yes" in text
    assert "blk.29.ffn_down.weight" in text
    assert "llama.block_count = 30" in text
    assert "<|im_start|>" in text


def test_quantised_safetensors_say_their_method(realizar: Callable[..., Any], tmp_path: Path) -> None:
    write_model(tmp_path, Stored("fp8"))
    assert (
        "quantised     by fp8: matrices 14 of E4M3 by 128, 1 of F16; activations in FP8 on GPUs of 9.0\n"
        in realizar("inspect", tmp_path).stdout
    )
    record = inspected(realizar, tmp_path)
    assert (record["quantised_by"], record["layouts"]) == ("fp8", {"E4M3 by 128": 14, "F16": 1})
    write_model(tmp_path, Stored("gptq", group=32, ordered=True))
    ordered = "14 of INT4 by 32 with zeros in act-order (on GPUs 16 bits), 1 of F16"
    assert f"matrices {ordered}\n" in realizar("inspect", tmp_path).stdout
    write_model(tmp_path, Stored("modelopt"))
    layers = {f"model.layers.{layer}.mlp": {"quant_algo": "W4A16_NVFP4"} for layer in (0, 1)}
    write_model_opt_file(tmp_path, quant_algo="MIXED_PRECISION", quantized_layers=layers)
    assert (
        "quantised     by modelopt: matrices 14 of NVFP4 by float16, 1 of F16\n" in realizar("inspect", tmp_path).stdout
    )


@pytest.mark.parametrize(
    ("scheme", "arguments", "said"),
    [
        ("float", ["inspect"], "keys, values  made for FP8, which --kv-cache-dtype fp8 keeps them in\n"),
        ("float", ["plan"], "keys, values made for FP8, which --kv-cache-dtype fp8 keeps them in\n"),
        ("float", ["plan", "--kv-cache-dtype", "fp8"], "keys, values made for FP8, as they are kept\n"),
        ("int", ["inspect"], "keys, values  made for int of 8 bits by tensor, which is not read: they are kept as"),
    ],
)
def test_a_scheme_for_keys_and_values_is_said(
    scheme: str, arguments: list[str], said: str, realizar: Callable[..., Any], tmp_path: Path
) -> None:
    scheme_of_cache = {"num_bits": 8, "type": scheme, "strategy": "tensor", "dynamic": False}
    write_model(tmp_path, Stored("float"), kv_cache_scheme=scheme_of_cache)
    assert said in realizar(*arguments, tmp_path).stdout


def test_a_vocabulary_alone_will_not_run(realizar: Callable[..., Any], vocabulary_only: Path) -> None:
    record = inspected(realizar, vocabulary_only)
    assert record["runs"] is False
    assert "no weights" in record["reason"]


def test_weights_alone_will_not_run(realizar: Callable[..., Any], weights_only: Path) -> None:
    record = inspected(realizar, weights_only)
    assert record["runs"] is False
    assert "vocab" in record["reason"]


def test_an_unknown_architecture_is_shown_with_the_reason(realizar: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "new.gguf"
    tensor = NewTensor("a.weight", GGMLType.F32, (4, 8), np.zeros((4, 8), np.float32))
    write_gguf(path, {"general.architecture": "hypothetical", "hypothetical.block_count": 3}, [tensor])
    record = inspected(realizar, path)
    assert record["runs"] is False
    assert "hypothetical" in record["reason"]
    assert record["tensors"][0]["shape"] == [4, 8]
    assert "will run      no: " in realizar("inspect", path).stdout


def test_a_missing_tensor_is_an_error(realizar: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "part.gguf"
    tensor = NewTensor("token_embd.weight", GGMLType.F32, (8, 32), np.zeros((8, 32), np.float32))
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": 8,
    }
    write_gguf(path, metadata, [tensor])
    result = realizar("inspect", path)
    assert result.status == 1
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"realizar: {path}: ")
    assert "blk.0.attn_q.weight" in result.stderr


@pytest.mark.parametrize("hostile", ["\x1b]0;owned\x07", "\x9b31m", "a\nb", "\u202e"])
def test_a_file_can_not_steer_the_terminal(realizar: Callable[..., Any], tmp_path: Path, hostile: str) -> None:
    path = tmp_path / "hostile.gguf"
    write_gguf(path, {"general.architecture": hostile, "general.name": hostile, "tokenizer.chat_template": hostile})
    text = realizar("inspect", path).stdout
    assert all(character.isprintable() for line in text.split("\n") for character in line)
