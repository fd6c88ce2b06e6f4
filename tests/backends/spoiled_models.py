"""Random models with one weight that is not finite, for loads that must refuse them by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from random_models import Recipe, random_model
from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.ggml_types import GGMLType
from realizar.models.spec import ModelSpec

BITS = {"inf": 0x7C00, "nan": 0x7E00}
_SCALE_AT = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208, "TQ1_0": 52, "TQ2_0": 64}


def spoil_block(block: np.ndarray, ggml_type: GGMLType, value: str) -> None:
    """Make the scale, or the number, that a block begins with not finite, in place. uint8 [type_size]"""
    bits = BITS[value]
    if ggml_type is GGMLType.F32:
        block[:] = np.array([value], "<f4").view(np.uint8)
    elif ggml_type is GGMLType.BF16:
        block[:] = np.array([value], "<f4").view(np.uint8)[2:]
    elif ggml_type is GGMLType.MXFP4:
        block[0] = 0xFF
    elif ggml_type is GGMLType.IQ1_M:
        nibbles = block[48:56].view("<u2")
        nibbles &= 0x0FFF
        nibbles |= np.array([(bits >> shift & 15) << 12 for shift in (0, 4, 8, 12)], "<u2")
    else:
        at = _SCALE_AT.get(ggml_type.name, 0)
        block[at : at + 2] = np.array([bits], "<u2").view(np.uint8)


def spoiled_model(recipe: Recipe, name: str, value: str) -> tuple[ModelSpec, Checkpoint]:
    """A recipe's model whose tensor `name` has one bad block, in its second half."""
    spec, checkpoint = random_model(recipe)
    tensor = checkpoint.tensors[name]
    blocks = tensor.data.copy().reshape(-1, tensor.ggml_type.type_size)
    spoil_block(blocks[2 * len(blocks) // 3], tensor.ggml_type, value)
    tensors = {**checkpoint.tensors, name: replace(tensor, data=blocks.reshape(-1))}
    return spec, replace(checkpoint, tensors=tensors)


def vector_names(recipe: Recipe) -> list[str]:
    """Norms, biases and sinks of the first layer, and what is in none."""
    tensors = random_model(recipe)[1].tensors
    return [name for name, tensor in tensors.items() if len(tensor.shape) == 1 and not name.startswith("layers.1")]
