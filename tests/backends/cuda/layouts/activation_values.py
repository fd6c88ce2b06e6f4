"""Activations in the two formats that quantised matmuls read, in numpy, as kernels should write them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cuda.layouts.activations import CHUNK, half_order, padded_cols

GROUP = 16  # columns that share an int8 scale


def half_positions(cols: int) -> NDArray[np.int64]:
    """The offset of each column from its token's first element of the chunk, in units of one core matrix row of eight.

    int64 [cols, 2]: index of the core matrix (0 to 7) and place in its row (0 to 7).
    """
    d = np.arange(cols) % CHUNK
    return np.stack([d % 16 // 4 * 2 + d % 2, d // 16 * 2 + d % 4 // 2], axis=1)


def int8_activations(x: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """float32 [tokens, cols] -> codes and terms of the `int8` format."""
    tokens, cols = x.shape
    padded = np.zeros((tokens, padded_cols(cols)), dtype=np.float32)
    padded[:, :cols] = x
    groups = padded.reshape(tokens, -1, GROUP)
    scales = np.abs(groups).max(axis=2) / np.float32(127)
    inverse = np.where(scales > 0, np.float32(1) / np.where(scales > 0, scales, np.float32(1)), np.float32(0))
    codes = np.rint(groups * inverse[..., None]).astype(np.int8)
    terms = np.stack([scales, scales * codes.sum(axis=2, dtype=np.int32)], axis=2)
    return codes.reshape(tokens, -1), terms.astype(np.float32)


def half_activations(x: NDArray[np.float32], block_tokens: int) -> tuple[NDArray[np.float16], NDArray[np.float32]]:
    """float32 [tokens, cols] -> values and token_scales of the `half` format, the last block filled up with zeros."""
    tokens, cols = x.shape
    blocks = -(-tokens // block_tokens)
    scales = np.ones(blocks * block_tokens, dtype=np.float32)
    scales[:tokens] = token_scales(x)
    padded = np.zeros((blocks * block_tokens, padded_cols(cols)), dtype=np.float32)
    padded[:tokens, :cols] = x / scales[:tokens, None]
    return half_order(padded.astype(np.float16), block_tokens), scales


def token_scales(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The power of two that each token is divided by: float32 [tokens]."""
    exponent = np.frexp(np.abs(x).max(axis=1))[1]  # the largest value lies in [2^(e-1), 2^e)
    shift = np.where(exponent > 14, exponent - 14, np.where((exponent < -8) & (exponent > -100), exponent + 4, 0))
    return np.ldexp(np.float32(1), shift).astype(np.float32)
