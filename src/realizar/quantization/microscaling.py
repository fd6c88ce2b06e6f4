"""Floats of four and eight bits: E2M1, E4M3 and E8M0. numpy only.

MXFP4 and NVFP4 are of E2M1 under a scale of eight bits. As in ggml (ggml-impl.h) the codebook holds E2M1 doubled, so
that it is of integers, and the scales are halved.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

E2M1_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)
"""int8 [16]: twice the value of each E2M1 code; minus zero is zero."""


@lru_cache
def half_e8m0() -> NDArray[np.float32]:
    """float32 [256]: half the value of each E8M0 byte, 2^(b - 128); 255, NaN by the standard, too, as in ggml."""
    return np.ldexp(np.ones(256), np.arange(256) - 128).astype(np.float32)


@lru_cache
def e8m0() -> NDArray[np.float32]:
    """float32 [256]: the value of each E8M0 byte, 2^(b - 127); 255 is NaN."""
    values = np.ldexp(np.ones(256), np.arange(256) - 127)
    values[255] = np.nan
    return values.astype(np.float32)


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


@lru_cache
def e4m3() -> NDArray[np.float32]:
    """float32 [256]: the value of each E4M3 byte; 0x7F and 0xFF are NaN."""
    magnitudes = 2 * half_e4m3()[:128]
    magnitudes[0x7F] = np.nan
    return np.concatenate([magnitudes, -magnitudes])
