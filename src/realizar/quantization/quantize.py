"""float32 to ggml blocks, for Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K and Q6_K. numpy only.

The format is exact. The five simple types round as ggml's reference quantisers do, to the same bytes; Q4_K and Q6_K
take scales from the extremes of each group and round to nearest, without ggml's search for better scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.ggml_types import GGMLType
from realizar.errors import UnsupportedModelError
from realizar.quantization.fields import Bytes, pack_fields

_Floats: TypeAlias = NDArray[np.float32]


def quantize(ggml_type: GGMLType, weights: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Blocks of a matrix, uint8 [size in bytes], its out_features one after another.

    Args:
        ggml_type: one of `QUANTIZABLE_TYPES`.
        weights: float32 [out_features, cols], finite, `cols` a whole number of blocks.

    Raises:
        UnsupportedModelError: for a type that we have no quantiser for.
        ValueError: where the columns are not a whole number of blocks.
    """
    quantizer = _QUANTIZERS.get(ggml_type)
    if quantizer is None:
        raise UnsupportedModelError(f"no quantiser for {ggml_type.name}")
    if weights.shape[-1] % ggml_type.block_size:
        raise ValueError(f"{weights.shape[-1]} columns are not a whole number of {ggml_type.name} blocks")
    return quantizer(weights.astype(np.float32, copy=False).reshape(-1, ggml_type.block_size)).reshape(-1)


def _symmetric(x: _Floats, bits: int) -> tuple[Bytes, Bytes]:
    """Q4_0, Q5_0: the largest magnitude becomes the code 0, which is one step longer than the highest code."""
    half = 1 << (bits - 1)
    scale = _largest(x) / np.float32(-half)
    codes = np.minimum(np.trunc(x * _reciprocal(scale) + np.float32(half + 0.5)), 2 * half - 1).astype(np.uint8)
    return _half(scale), codes


def _affine(x: _Floats, bits: int) -> tuple[Bytes, Bytes, Bytes]:
    """Q4_1, Q5_1: from the smallest value to the largest."""
    low = x.min(axis=-1, keepdims=True)
    highest = (1 << bits) - 1
    scale = (x.max(axis=-1, keepdims=True) - low) / np.float32(highest)
    codes = np.minimum(np.trunc((x - low) * _reciprocal(scale) + np.float32(0.5)), highest).astype(np.uint8)
    return _half(scale), _half(low), codes


def _q4_0(x: _Floats) -> Bytes:
    scale, codes = _symmetric(x, 4)
    return np.concatenate([scale, pack_fields(codes, 4, 16)], axis=-1)


def _q4_1(x: _Floats) -> Bytes:
    scale, low, codes = _affine(x, 4)
    return np.concatenate([scale, low, pack_fields(codes, 4, 16)], axis=-1)


def _q5_0(x: _Floats) -> Bytes:
    scale, codes = _symmetric(x, 5)
    return np.concatenate([scale, *_split_fifth(codes)], axis=-1)


def _q5_1(x: _Floats) -> Bytes:
    scale, low, codes = _affine(x, 5)
    return np.concatenate([scale, low, *_split_fifth(codes)], axis=-1)


def _split_fifth(codes: Bytes) -> tuple[Bytes, Bytes]:
    return pack_fields(codes >> np.uint8(4), 1, 1), pack_fields(codes & np.uint8(15), 4, 16)


def _q8_0(x: _Floats) -> Bytes:
    scale = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
    scaled = x * _reciprocal(scale)
    magnitude = np.abs(scaled)
    whole = np.floor(magnitude)
    whole += magnitude - whole >= 0.5  # C's roundf: halves go away from zero
    codes = np.copysign(whole, scaled).astype(np.int8)
    return np.concatenate([_half(scale), codes.view(np.uint8)], axis=-1)


def _q4_k(x: _Floats) -> Bytes:
    groups = x.reshape(-1, 8, 32)
    low = np.minimum(groups.min(axis=-1), 0)
    scale = (groups.max(axis=-1) - low) / np.float32(15)
    super_scale = _rounded_to_half(scale.max(axis=-1, keepdims=True) / np.float32(63))
    super_minimum = _rounded_to_half(-low.min(axis=-1, keepdims=True) / np.float32(63))
    scales = np.clip(np.rint(scale * _reciprocal(super_scale)), 0, 63)
    minima = np.clip(np.rint(-low * _reciprocal(super_minimum)), 0, 63)
    shifted = groups + (super_minimum * minima)[..., None]
    codes = np.clip(np.rint(shifted * _reciprocal(super_scale * scales)[..., None]), 0, 15).astype(np.uint8)
    packed = pack_fields(codes.reshape(-1, 256), 4, 32)
    six_bits = _pack_six_bits(scales.astype(np.uint8), minima.astype(np.uint8))
    return np.concatenate([_half(super_scale), _half(super_minimum), six_bits, packed], axis=-1)


def _pack_six_bits(scales: Bytes, minima: Bytes) -> Bytes:
    """uint8 [n, 8] each -> uint8 [n, 12]; `k_quants` describes the layout."""
    first = np.concatenate([scales[:, :4], minima[:, :4]], axis=-1)
    later = np.concatenate([scales[:, 4:], minima[:, 4:]], axis=-1)
    tops = (later >> np.uint8(4)) << np.uint8(6)
    lows = (scales[:, 4:] & np.uint8(15)) | (minima[:, 4:] << np.uint8(4))
    return np.concatenate([first | tops, lows], axis=-1)


def _q6_k(x: _Floats) -> Bytes:
    groups = x.reshape(-1, 16, 16)
    scale = (_largest(groups) / np.float32(-32))[..., 0]
    super_scale = _rounded_to_half(_largest(scale) / np.float32(-128))
    scales = np.clip(np.rint(scale * _reciprocal(super_scale)), -128, 127)
    steps = np.rint(groups * _reciprocal(super_scale * scales)[..., None])
    codes = (np.clip(steps, -32, 31) + 32).astype(np.uint8).reshape(-1, 256)
    low, high = pack_fields(codes & np.uint8(15), 4, 64), pack_fields(codes >> np.uint8(4), 2, 32)
    return np.concatenate([low, high, scales.astype(np.int8).view(np.uint8), _half(super_scale)], axis=-1)


def _largest(x: _Floats) -> _Floats:
    """Along the last axis, the value of the largest magnitude, with its sign: [..., n] -> [..., 1]."""
    return np.take_along_axis(x, np.abs(x).argmax(axis=-1, keepdims=True), axis=-1)


def _reciprocal(x: _Floats) -> _Floats:
    return np.divide(np.float32(1), x, out=np.zeros_like(x), where=x != 0)


def _rounded_to_half(x: _Floats) -> _Floats:
    return x.astype(np.float16).astype(np.float32)


def _half(x: _Floats) -> Bytes:
    """float32 [n, 1] -> the bytes of float16: uint8 [n, 2]."""
    return x.astype("<f2").view(np.uint8)


_QUANTIZERS: dict[GGMLType, Callable[[_Floats], Bytes]] = {
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q6_K: _q6_k,
}

QUANTIZABLE_TYPES: tuple[GGMLType, ...] = tuple(_QUANTIZERS)
"""The types that `quantize` makes."""
