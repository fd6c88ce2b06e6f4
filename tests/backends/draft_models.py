"""Models that draft for a random one: itself, its first layers, and one that knows nothing of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from random_models import Recipe, random_model
from realizar.backends.base import ModelSource
from realizar.models.spec import ModelSpec


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


def spoiled(recipe: Recipe) -> ModelSource:
    """The model with a weight that is not finite, which is found while weights are read."""
    spec, checkpoint = random_model(recipe)
    name = spec.linears()[0].weight
    (stored,) = spec.tensors[name].names
    tensor = checkpoint.tensors[stored]
    tensors = {**checkpoint.tensors, stored: replace(tensor, data=np.full_like(tensor.data, 255))}
    return ModelSource(spec, replace(checkpoint, tensors=tensors))
