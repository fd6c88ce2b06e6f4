"""Recurrences over long sequences: the reference model's logits and states against those of transformers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from architectures import MAX_RELATIVE_ERROR, build_case
from realizar.checkpoint.open import open_checkpoint
from realizar.models.mixers import GatedDeltaNet
from realizar.models.registry import build_spec
from reference_model import ReferenceModel, State
from reference_tensors import load_tensors

torch = pytest.importorskip("torch", reason="parity is against transformers, which needs torch")
pytest.importorskip("transformers", reason="parity is against transformers")

NAMES = ["lfm2", "lfm2moe", "qwen35", "qwen35-two", "qwen35moe", "qwen3next"]
LOGITS_TOKENS, STATE_TOKENS, DECODED = 5000, 10000, 8


def _opened(name: str, folder: Path) -> tuple[Any, ReferenceModel, list[int]]:
    """Transformers' model, the reference model of its files, and as many tokens as the longest sequence has."""
    built = build_case(name, folder, "safetensors")
    checkpoint = open_checkpoint(built.path)
    spec = build_spec(checkpoint)
    tokens = np.random.default_rng(3).integers(0, spec.vocab_size, STATE_TOKENS).tolist()
    return built.model, ReferenceModel(spec, load_tensors(spec, checkpoint)), tokens


def _in_chunks(model: ReferenceModel, tokens: list[int], size: int, decoded: int) -> NDArray[Any]:
    """Logits of chunks of a size, and of the last tokens one by one."""
    last, state = len(tokens) - decoded, State()
    bounds = [*range(0, last, size), *range(last, len(tokens) + 1)]
    return np.concatenate([model.logits(tokens[start:stop], state) for start, stop in pairwise(bounds)])


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_logits_of_5000_tokens(name: str, tmp_path: Path) -> None:
    """Whole, in chunks of 1, 7, 64 and 512 tokens, and gone on with by single tokens."""
    oracle, model, tokens = _opened(name, tmp_path)
    tokens = tokens[:LOGITS_TOKENS]
    with torch.no_grad():
        expected = oracle(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    scale = np.linalg.norm(expected, axis=-1)
    for size in (LOGITS_TOKENS, 512, 64, 7, 1):
        error = np.linalg.norm(_in_chunks(model, tokens, size, DECODED) - expected, axis=-1) / scale
        assert error.max() <= MAX_RELATIVE_ERROR, f"chunks of {size}: {error.max():.2e} at token {error.argmax()}"


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("lfm2")])
def test_states_after_10000_tokens(name: str, tmp_path: Path) -> None:
    """The state of every gated delta net, which transformers reads in one go, and the reference model in chunks."""
    oracle, model, tokens = _opened(name, tmp_path)
    with torch.no_grad():
        cache = oracle(torch.tensor([tokens]), use_cache=True, logits_to_keep=1).past_key_values
    state = State()
    for start in range(0, STATE_TOKENS, 1000):
        model.logits(tokens[start : start + 1000], state)
    layers = [index for index, layer in enumerate(model.spec.layers) if isinstance(layer.mixer, GatedDeltaNet)]
    assert layers
    for index in layers:
        expected = cache.get_recurrent_state(index, state_idx=0)[0].numpy()
        error = np.linalg.norm(state[index][1] - expected) / np.linalg.norm(expected)
        assert error <= MAX_RELATIVE_ERROR, f"layer {index}: {error:.2e}"
