"""A real model whose matrices a method of safetensors stores, through the packed kernels, beside exact arithmetic.

llama.cpp's divergence is that of `test_fidelity.py`, on the GGUF file that the weights come from.
"""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cpu_runs import load_runner
from fidelity.fidelity_rows import KEYS, TOP, Row, divergence, mean
from fidelity.test_fidelity import _DATA, score
from quantization.stored_checkpoints import Stored, nearest_matrix, write_checkpoint
from realizar.checkpoint.open import open_checkpoint
from realizar.config import EngineConfig
from realizar.models.registry import build_spec
from reference_model import ReferenceModel
from reference_tensors import load_tensors
from wider import wider

MOST = 1.15  # of llama.cpp's divergence
FORMS = [
    Stored("awq", group=64), Stored("gptq", group=32, symmetric=True), Stored("fp8", scale="float32"),
    Stored("unpacked", bits=8, group=0, symmetric=True),
]  # fmt: skip


@pytest.mark.parametrize("stored", wider(FORMS, FORMS[0]), ids=str)
def test_divergence_of_stored_matrices(stored: Stored, smollm2_path: Path, tmp_path: Path) -> None:
    prompts = json.loads(lzma.decompress(_DATA.read_bytes()))[KEYS["smollm2"]]["prompts"][:3]
    theirs = mean([
        divergence(exact, peer)
        for prompt in prompts
        for exact, peer in zip(prompt["exact_top_logprobs"], prompt["llamacpp_top_logprobs"], strict=True)
    ])  # fmt: skip
    write_stored_smollm2(smollm2_path, stored, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    spec = build_spec(checkpoint, 256)
    model = ReferenceModel(spec, load_tensors(spec, checkpoint))
    exact = [row for prompt in prompts for row in exact_rows(model, prompt["prompt_tokens"], prompt["tokens"])]
    runner = load_runner(tmp_path, EngineConfig(kv_cache_dtype="f16", max_running=1, kv_cache_bytes=64 << 20), 256)
    found = score(runner, prompts)
    runner.close()
    ours = mean([divergence(*pair) for pair in zip(exact, found, strict=True)])
    print(f"{stored.method}: {ours:.5f}, llama.cpp {theirs:.5f}, ratio {ours / theirs:.3f}")  # noqa: T201
    assert 0 < ours <= MOST * theirs


def exact_rows(model: ReferenceModel, prompt: list[int], tokens: list[int]) -> list[Row]:
    """The most probable ids at each place where one of `tokens` was chosen."""
    logits = model.logits([*prompt, *tokens])[len(prompt) - 1 : -1].astype(np.float64)
    logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    best = np.argsort(-logprobs, axis=1)[:, :TOP]
    return [[[int(token), float(row[token])] for token in ids] for row, ids in zip(logprobs, best, strict=True)]


def write_stored_smollm2(path: Path, stored: Stored, folder: Path) -> None:
    """The model of a GGUF file in safetensors, its layers' matrices in the nearest numbers that are stored so."""
    checkpoint = open_checkpoint(path)
    spec = build_spec(checkpoint)
    tensors: dict[str, NDArray[np.generic]] = {}
    for name, values in load_tensors(spec, checkpoint).items():
        if values.ndim == 2 and "layers" in name:
            made, _ = nearest_matrix(stored, _halves_of_heads(name, values))
            tensors |= {name.removesuffix(".weight") + suffix: array for suffix, array in made.items()}
        else:
            tensors[name] = values
    metadata = {key.removeprefix("llama."): value for key, value in checkpoint.metadata.items()}
    write_checkpoint(folder, tensors, stored.config, {
        "model_type": "llama", "tie_word_embeddings": True, "hidden_act": "silu", "vocab_size": spec.vocab_size,
        "num_hidden_layers": metadata["block_count"], "hidden_size": metadata["embedding_length"],
        "intermediate_size": metadata["feed_forward_length"], "max_position_embeddings": metadata["context_length"],
        "num_attention_heads": metadata["attention.head_count"], "rope_theta": metadata["rope.freq_base"],
        "num_key_value_heads": metadata["attention.head_count_kv"],
        "rms_norm_eps": metadata["attention.layer_norm_rms_epsilon"],
    })  # fmt: skip


def _halves_of_heads(name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of queries and keys as transformers rotates them, halves of heads of 64, in place of pairs."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return values
    return values.reshape(-1, 32, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
