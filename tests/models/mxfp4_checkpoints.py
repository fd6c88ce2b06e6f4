"""Safetensors checkpoints whose experts are of MXFP4, as gpt-oss's are: codes and scales in tensors of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
CONFIG: dict[str, Any] = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


def random_codes(shape: tuple[int, int, int], rng: np.random.Generator) -> tuple[NDArray[Any], NDArray[Any]]:
    """Codes uint8 [experts, out_features, groups, 16] and scales uint8 [experts, out_features, groups]."""
    experts, out_features, in_features = shape
    groups = experts, out_features, in_features // 32
    return rng.integers(0, 256, (*groups, 16), np.uint8), rng.integers(120, 126, groups, np.uint8)


def decoded(codes: NDArray[Any], scales: NDArray[Any]) -> NDArray[np.float32]:
    """float32 [experts, out_features, in_features]: low bits first, times a power of two."""
    values = np.empty((*codes.shape[:-1], 32), np.float32)
    values[..., 0::2], values[..., 1::2] = E2M1[codes & 15], E2M1[codes >> 4]
    values *= np.exp2(scales.astype(np.float32) - 127)[..., None]
    return values.reshape(*codes.shape[:2], -1)


def byte_tensor(like: StoredTensor, name: str, values: NDArray[np.uint8]) -> StoredTensor:
    """A tensor of bytes, which have no ggml type."""
    return dataclasses.replace(
        like, name=name, ggml_type=None, dtype="U8", shape=values.shape, data=values.reshape(-1)
    )  # fmt: skip


def with_mxfp4_experts(
    checkpoint: Checkpoint, rng: np.random.Generator
) -> tuple[Checkpoint, dict[str, NDArray[np.float32]]]:
    """A checkpoint of plain experts, [experts, in_features, out_features], with others of MXFP4 in their place.

    Returns the values of the tensors that are gone, as they were laid out.
    """
    tensors, values = dict(checkpoint.tensors), {}
    for name, stored in checkpoint.tensors.items():
        if name.endswith((".gate_up_proj", ".experts.down_proj")):
            experts, in_features, out_features = tensors.pop(name).shape
            codes, scales = random_codes((experts, out_features, in_features), rng)
            values[name] = decoded(codes, scales).swapaxes(1, 2)
            tensors[f"{name}_blocks"] = byte_tensor(stored, f"{name}_blocks", codes)
            tensors[f"{name}_scales"] = byte_tensor(stored, f"{name}_scales", scales)
    config = {**checkpoint.metadata["config"], **CONFIG}
    metadata = {**checkpoint.metadata, "config": config}
    return dataclasses.replace(checkpoint, tensors=tensors, metadata=metadata), values
