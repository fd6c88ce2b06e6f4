"""MXFP4 and NVFP4: four-bit floats (E2M1) under an eight-bit float scale.

Layouts: ggml-common.h; formulas: ggml-quants.c, ggml-impl.h. As in ggml the codebook holds E2M1 doubled, so that it
is of integers, and the scales are halved. Each function takes raw blocks, uint8 [out_features, blocks, type_size].
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from realizar.quantization.fields import Bytes, bit_fields, columns
from realizar.quantization.planes import Planes

E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)
"""int8 [16]: twice the value of each E2M1 code; minus zero is zero."""


def mxfp4(blocks: Bytes) -> Planes:
    """One scale byte (E8M0: a power of two), then nibbles of 32 columns."""
    codes = columns(bit_fields(blocks[..., 1:], 4, 16))
    scales = half_e8m0()[blocks[..., 0]]
    return Planes(codes=codes, bits=4, offset=0, group_size=32, scales=scales, codebook=E2M1_DOUBLED)


def nvfp4(blocks: Bytes) -> Planes:
    """Four scale bytes (E4M3, its sign ignored), then nibbles of four groups of 16 columns."""
    codes = columns(bit_fields(blocks[..., 4:], 4, 8))
    scales = columns(half_e4m3()[blocks[..., :4]])
    return Planes(codes=codes, bits=4, offset=0, group_size=16, scales=scales, codebook=E2M1_DOUBLED)


@lru_cache
def half_e8m0() -> NDArray[np.float32]:
    """float32 [256]: half the value of each E8M0 byte, 2^(b - 128); 255, NaN by the standard, too, as in ggml."""
    return np.ldexp(np.ones(256), np.arange(256) - 128).astype(np.float32)


@lru_cache
def half_e4m3() -> NDArray[np.float32]:
    """float32 [256]: half the value of each E4M3 byte without its sign. 0x7F, NaN by the standard, is 0 in ggml."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    magnitude = np.where(exponent == 0, mantissa, mantissa + 8)
    values = np.ldexp(magnitude.astype(np.float64), np.maximum(exponent, 1) - 11)
    values[0x7F] = 0
    halved: NDArray[np.float32] = values.astype(np.float32)
    return halved
