"""Models that draft for a random one: itself, its first layers, one that knows nothing of it, a next-token block."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from random_models import Recipe, random_model
from realizar.backends.base import ModelSource
from realizar.checkpoint.checkpoint import StoredTensor
from realizar.checkpoint.ggml_types import GGMLType
from realizar.models.parts import Linear, NextTokenInputs, Norm
from realizar.models.spec import ModelSpec
from realizar.models.tensor_source import TensorSource
from realizar.quantization.random_blocks import random_blocks


def itself(recipe: Recipe) -> ModelSource:
    """The model as its own drafter, whose drafts are all right."""
    return ModelSource(*random_model(recipe))


def first_layers(recipe: Recipe, count: int) -> ModelSource:
    """The model's first layers, then its final norm and head: some drafts are right."""
    spec, checkpoint = random_model(recipe)
    cut: ModelSpec = replace(spec, layers=spec.layers[:count])
    names = {name for source in cut.tensors.values() for name in source.names}
    tensors = {name: stored for name, stored in checkpoint.tensors.items() if name in names}
    return ModelSource(cut, replace(checkpoint, tensors=tensors))


def another(recipe: Recipe) -> ModelSource:
    """A model of other weights, and half the layers."""
    return ModelSource(*random_model(replace(recipe, seed=recipe.seed + 1, windows=recipe.windows[:1])))


def roughly(recipe: Recipe, noise: float) -> ModelSource:
    """The model with noise on its F32 matrices, as a share of each weight's size: many drafts are right."""
    spec, checkpoint = random_model(recipe)
    rng, tensors = np.random.default_rng(recipe.seed + 7), dict(checkpoint.tensors)
    for linear in spec.linears():
        (stored,) = spec.tensors[linear.weight].names
        values = np.array(tensors[stored].data).view(np.float32)
        values *= 1 + noise * rng.standard_normal(values.shape).astype(np.float32)
        tensors[stored] = replace(tensors[stored], data=values.view(np.uint8))
    return ModelSource(spec, replace(checkpoint, tensors=tensors))


def spoiled(recipe: Recipe) -> ModelSource:
    """The model with a weight that is not finite, which is found while weights are read."""
    spec, checkpoint = random_model(recipe)
    name = spec.linears()[0].weight
    (stored,) = spec.tensors[name].names
    tensor = checkpoint.tensors[stored]
    tensors = {**checkpoint.tensors, stored: replace(tensor, data=np.full_like(tensor.data, 255))}
    return ModelSource(spec, replace(checkpoint, tensors=tensors))


def next_token_block(recipe: Recipe, of_state: float | None = 0.0) -> ModelSource:
    """A block that foresees a model of one layer as far as it leaves out `of_state`, the share of states before.

    Its layer is the model's last, and it makes nearly the model's stream of an embedding. With an `of_state` of None
    its first matrix is random, of the type of the model's.
    """
    spec, checkpoint = random_model(recipe)
    hidden, rng = recipe.hidden_size, np.random.default_rng(recipe.seed)
    scale = spec.embedding_scale / math.sqrt(hidden)  # that of the model's stream
    token = scale * np.eye(hidden, dtype=np.float32)
    state = ((of_state or 0.0) / math.sqrt(hidden)) * rng.standard_normal((hidden, hidden)).astype(np.float32)
    added = {
        "block.eh_proj": np.concatenate([token, state], axis=1),
        "block.enorm": np.ones(hidden, np.float32), "block.hnorm": np.linspace(0.5, 1.5, hidden, dtype=np.float32),
    }  # fmt: skip
    stored = {
        name: StoredTensor(
            name, GGMLType.F32, values.shape, values.view(np.uint8).reshape(*values.shape[:-1], -1), checkpoint.path, 0
        )
        for name, values in added.items()
    }
    if of_state is None:
        kind = GGMLType[recipe.weights]
        blocks = random_blocks(kind, hidden, 2 * hidden, rng, 1 / math.sqrt(hidden))
        stored["block.eh_proj"] = replace(stored["block.eh_proj"], ggml_type=kind, data=blocks)
    whole, halves = TensorSource("block.eh_proj", (hidden, 2 * hidden)), ((0, hidden), (hidden, 2 * hidden))
    parts = {f"block.{first}": whole.cut(columns=[(first, stop)]) for first, stop in halves}
    norms = {name: TensorSource(name, (hidden,)) for name in ("block.enorm", "block.hnorm")}
    inputs = NextTokenInputs(
        *(Norm("rms", 1e-5, name) for name in norms), *(Linear(name, hidden, hidden) for name in parts)
    )
    cut: ModelSpec = replace(
        spec, layers=spec.layers[-1:], next_token=inputs, tensors={**spec.tensors, **norms, **parts}
    )
    own = {
        cut.embedding,
        *cut.vectors(),
        *(name for each in cut.matrices() for name in (each.weight, each.bias) if name),
    }
    cut = replace(cut, tensors={name: source for name, source in cut.tensors.items() if name in own})
    names = {name for source in cut.tensors.values() for name in source.names}
    tensors = {name: each for name, each in {**checkpoint.tensors, **stored}.items() if name in names}
    return ModelSource(cut, replace(checkpoint, tensors=tensors))
