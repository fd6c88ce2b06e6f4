"""Canonical tensors as sources: matrices and vectors that are fused in a checkpoint, and experts, stacked or apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from random_models import Recipe, random_model
from realizar.backends.weight_tensors import WeightTensors
from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.ggml_types import GGMLType
from realizar.errors import CheckpointError, UnsupportedModelError
from realizar.models.parts import Linear
from realizar.models.tensor_source import TensorSource
from realizar.quantization.convert import dequantize
from realizar.quantization.random_blocks import random_blocks

PATH = Path("m.gguf")


def tensors_of(places: dict[str, TensorSource], *stored: StoredTensor) -> WeightTensors:
    """The tensors of a model that has these beside others."""
    spec, checkpoint = random_model(Recipe(windows=(None,)))
    held = {**checkpoint.tensors, **{each.name: each for each in stored}}
    return WeightTensors(replace(spec, tensors={**spec.tensors, **places}), Checkpoint(PATH, "gguf", {}, held))


def stored(name: str, ggml_type: GGMLType, *shape: int) -> tuple[StoredTensor, np.ndarray]:
    rows = int(np.prod(shape[:-1]))
    data = random_blocks(ggml_type, rows, shape[-1], np.random.default_rng(len(name)), 0.05)
    tensor = StoredTensor(name, ggml_type, shape, data, PATH, 0)
    return tensor, dequantize(ggml_type, data, rows, shape[-1]).reshape(shape)


def test_parts_of_fused_tensors() -> None:
    matrix, weights = stored("qkv", GGMLType.Q4_K, 12, 256)
    bias, values = stored("qkv.bias", GGMLType.F16, 12)
    places = {
        "k": TensorSource("qkv", (4, 256), 6, True),
        "k.bias": TensorSource("qkv.bias", (4,), 6, True),
        "whole": TensorSource("qkv", (12, 256)),
    }
    tensors = tensors_of(places, matrix, bias)
    np.testing.assert_array_equal(tensors.matrix("k").dequantize(), weights[6:10])
    np.testing.assert_array_equal(tensors.matrix("whole").dequantize(), weights)
    np.testing.assert_array_equal(tensors.vector("k.bias"), values[6:10])
    assert tensors.layout("k").name == "Q4_K"
    assert [tensors.size_bytes(name) for name in places] == [4 * 144, 4 * 2, 12 * 144]


def test_experts_apart_are_of_one_type() -> None:
    first, _ = stored("expert.0", GGMLType.Q8_0, 5, 64)
    second, _ = stored("expert.1", GGMLType.BF16, 5, 64)
    names = first.name, second.name
    tensors = tensors_of({"apart": TensorSource(names[0], (2, 5, 64), stack=names)}, first, second)
    with pytest.raises(
        UnsupportedModelError, match=r"m.gguf: tensor 'expert.1' is of type BF16, and 'expert.0' of Q8_0"
    ):
        tensors.layout("apart")


def test_experts() -> None:
    together, weights = stored("experts", GGMLType.Q8_0, 3, 5, 64)
    apart = [stored(f"expert.{'x' * index}", GGMLType.BF16, 5, 64) for index in range(3)]
    names = tuple(tensor.name for tensor, _ in apart)
    places = {
        "together": TensorSource("experts", (3, 5, 64)),
        "apart": TensorSource(names[0], (3, 5, 64), stack=names),
        "fused": TensorSource("experts", (3, 2, 64), 3, True),
    }
    tensors = tensors_of(places, together, *(tensor for tensor, _ in apart))
    for expert in range(3):
        np.testing.assert_array_equal(tensors.expert("together", expert).dequantize(), weights[expert])
        np.testing.assert_array_equal(tensors.expert("apart", expert).dequantize(), apart[expert][1])
        np.testing.assert_array_equal(tensors.expert("fused", expert).dequantize(), weights[expert, 3:])
    for name in places:
        for beyond in (-1, 3):
            with pytest.raises(ValueError, match=f"has 3 experts, and not number {beyond}"):
                tensors.expert(name, beyond)
    assert tensors.size_bytes("together") == 3 * 5 * 2 * 34


def test_float32_matrices() -> None:
    spec, checkpoint = random_model(Recipe(weights="F32", windows=(None,)))
    tensors = WeightTensors(spec, checkpoint)
    assert tensors.are_float32(spec.linears())
    assert not tensors.are_float32([*spec.linears(), Linear(spec.embedding, spec.vocab_size, spec.hidden_size)])


def test_vectors_that_are_not_finite_are_refused() -> None:
    recipe = Recipe(windows=(None,), parts=("biases", "sinks"))
    spec, checkpoint = random_model(recipe)
    WeightTensors(spec, checkpoint).check_vectors()
    for name in ("layers.0.sinks", "layers.0.q.bias", "final_norm.weight"):
        bad = checkpoint.tensors[name].data.copy()
        bad.view("<f4")[1] = np.nan
        tensors = {**checkpoint.tensors, name: replace(checkpoint.tensors[name], data=bad)}
        with pytest.raises(CheckpointError, match=f"tensor '{name}': number 1 is not finite"):
            WeightTensors(spec, replace(checkpoint, tensors=tensors)).check_vectors()
