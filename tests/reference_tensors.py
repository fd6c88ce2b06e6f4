"""Canonical tensors of a checkpoint as float arrays, for the reference model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.models.spec import ModelSpec
from realizar.models.tensor_source import TensorSource
from realizar.quantization.tensors import tensor_shape, tensor_source


def load_tensors(spec: ModelSpec, checkpoint: Checkpoint) -> dict[str, NDArray[np.float32]]:
    """Every tensor that `spec` names, dequantised, by canonical name; shapes are those the spec expects."""
    return {name: load_tensor(source, checkpoint) for name, source in spec.tensors.items()}


def load_tensor(source: TensorSource, checkpoint: Checkpoint) -> NDArray[np.float32]:
    """One canonical tensor: the rows of a checkpoint tensor that the source describes, or a stack of several."""
    if source.whole is not None:
        values, axis = load_tensor(source.whole, checkpoint), source.out_feature_axis
        for runs, at in ((source.rows, axis), (source.columns, axis + 1)):
            if runs is not None:
                values = np.concatenate([values.take(range(*run), at) for run in runs], at)
        assert values.shape == source.shape
        return values
    if source.stack:
        return np.stack([_values(checkpoint, name) for name in source.stack])
    values = _values(checkpoint, source.name)
    if source.stored_shape is not None:
        return values.reshape(source.shape)
    if source.transposed:
        values = values.swapaxes(-1, -2)
    part = values.take(source.out_features(), source.out_feature_axis)
    assert part.shape == source.shape
    return part


def _values(checkpoint: Checkpoint, name: str) -> NDArray[np.float32]:
    return tensor_source(checkpoint, name).dequantize().reshape(tensor_shape(checkpoint, name))


def looked_up(spec: ModelSpec, checkpoint: Checkpoint, ids: Sequence[int]) -> NDArray[np.float32]:
    """The embeddings of ids as layers get them, float32 [ids, hidden_size]."""
    table = load_tensor(spec.tensors[spec.embedding], checkpoint)
    return table[list(ids)] * np.float32(spec.embedding_scale)
