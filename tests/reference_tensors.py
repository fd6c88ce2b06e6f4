"""Canonical tensors of a checkpoint as float arrays, for the reference model."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.models.spec import ModelSpec, TensorSource
from realizar.quantization.convert import dequantize


def load_tensors(spec: ModelSpec, checkpoint: Checkpoint) -> dict[str, NDArray[np.float32]]:
    """Every tensor that `spec` names, dequantised, by canonical name; shapes are those the spec expects."""
    return {name: load_tensor(source, checkpoint) for name, source in spec.tensors.items()}


def load_tensor(source: TensorSource, checkpoint: Checkpoint) -> NDArray[np.float32]:
    """One canonical tensor: the rows of a checkpoint tensor that the source describes."""
    stored = checkpoint.tensors[source.name]
    # A vector is one row of values, so rows of a fused bias are columns here.
    rows, cols = (math.prod(stored.shape[:-1]), stored.shape[-1])
    values = dequantize(stored.ggml_type, stored.data, rows, cols).reshape(stored.shape)
    part = values[source.first_row : source.first_row + source.shape[0]]
    assert part.shape == source.shape
    return part
