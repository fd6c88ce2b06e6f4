"""Models of gated delta nets: places of their tensors in files, what is refused, and chunks of random ones."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from architectures import build_case
from random_models import Recipe, random_model, random_tokens
from realizar.backends.weight_tensors import WeightTensors
from realizar.checkpoint.open import open_checkpoint
from realizar.models.registry import build_spec
from reference_model import ReferenceModel, State
from reference_tensors import load_tensors
from wider import diagonal

RECIPES = [
    Recipe(hidden_size=64, windows=(None,) * 3, recurrent=("delta", None, "delta"), weights="F32"),
    Recipe(
        hidden_size=64, windows=(None,) * 3, recurrent=(None, "delta"), weights="F32", value_heads=4, key_size=16,
        value_size=24, length=3, parts=("output_gate", "tiled", "biases", "qk_norm", "partial_rope"),
    ),
    Recipe(hidden_size=64, windows=(None, 8), recurrent=("convolution",), weights="F32", parts=("output_gate",)),
]  # fmt: skip


@pytest.mark.parametrize(("size", "recipe"), diagonal([1, 7, 64, 512], RECIPES))
def test_chunks_equal_the_whole(recipe: Recipe, size: int) -> None:
    spec, checkpoint = random_model(recipe)
    model, tokens = ReferenceModel(spec, load_tensors(spec, checkpoint)), random_tokens(recipe, 520)
    whole, state = model.logits(tokens), State()
    bounds = [*range(0, len(tokens), size), len(tokens)]
    parts = np.concatenate([model.logits(tokens[start:stop], state) for start, stop in pairwise(bounds)])
    assert np.linalg.norm(parts - whole) <= 1e-5 * np.linalg.norm(whole)


@pytest.mark.parametrize(("name", "form"), [("qwen35", "gguf"), ("qwen35-uneven", "safetensors")])
def test_sources_of_parts_that_alternate(name: str, form: str, tmp_path: Path) -> None:
    """Backends get queries and gates, in matrices and biases, as the reference model does."""
    pytest.importorskip("torch", reason="rows are made by transformers, which needs torch")
    pytest.importorskip("transformers", reason="rows are made by transformers")
    built = build_case(name, tmp_path, "gguf" if form == "gguf" else "safetensors")
    checkpoint = open_checkpoint(built.path)
    spec = build_spec(checkpoint)
    expected, tensors = load_tensors(spec, checkpoint), WeightTensors(spec, checkpoint)
    tensors.check_vectors()
    for linear in spec.linears():
        source = tensors.matrix(linear.weight)
        assert (source.out_features, source.in_features) == (linear.out_features, linear.in_features)
        np.testing.assert_array_equal(source.dequantize(), expected[linear.weight])
        assert tensors.size_bytes(linear.weight) == source.size_bytes
        if linear.bias is not None:
            np.testing.assert_array_equal(tensors.vector(linear.bias), expected[linear.bias])
