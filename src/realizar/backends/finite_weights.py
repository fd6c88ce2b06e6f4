"""Tensors with weights that are NaN or infinite, refused by name while they are packed. numpy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.naming import shown
from realizar.errors import CheckpointError
from realizar.models.spec import ModelSpec
from realizar.quantization import find_not_finite


def check_finite(stored: StoredTensor, data: NDArray[np.uint8], first_byte: int = 0) -> None:
    """Refuse a tensor of which some blocks are not finite: they would make random text of every prompt.

    Args:
        stored: the tensor.
        data: uint8, whole blocks of it.
        first_byte: of the tensor, at which they lie.

    Raises:
        CheckpointError: a weight is NaN or infinite.
    """
    reason = find_not_finite(stored.ggml_type, data)
    if reason is not None:
        part = f" after byte {first_byte} of it" if first_byte else ""
        raise CheckpointError(stored.path, f"tensor {shown(stored.name)}", f"{reason}{part}")


def check_vectors(spec: ModelSpec, checkpoint: Checkpoint) -> None:
    """Refuse a norm, bias, sink or convolution that is not finite: they are small, and some are first read in a step.

    Raises:
        CheckpointError: a value is NaN or infinite.
    """
    biases = (linear.bias for linear in spec.linears() if linear.bias is not None)
    for name in dict.fromkeys(spec.tensors[name].name for name in (*spec.vectors(), *biases)):
        stored = checkpoint.tensors[name]
        check_finite(stored, stored.data)
