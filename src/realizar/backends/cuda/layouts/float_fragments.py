"""Float weights in the register order of the tensor cores, as halves: the format `FLOATS`. numpy only.

A block of 64 out_features by a chunk of 64 columns is [tile 4][step 4][lane 32][16 bytes]: what a lane holds for one
matrix instruction, columns 16 t + 4 step + 0 .. 3 of out_features g (half 0) and g + 8 (half 1) of its tile, as four
pairs. Pair 2 H + half has columns H and H + 2 of the four.

Each 64 out_features are multiplied by a power of two, such that the largest weight is just below 2^15, and
`block_scales` divides the sums again. So fp16 weights lose nothing, nor do bf16 weights whose size is within 2^-32 of
the largest of their 64 out_features; smaller ones are rounded to 2^-39 of it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cuda.layouts.fragments import BLOCK, FLOATS

ORDER = 0, 4, 1, 6, 3, 5, 8, 2, 7
"""Of a strip's axes [strip, tile, half, g, chunk, t, step, pair, H], to those in memory."""


def strip_axes(strips: int, chunks: int) -> tuple[int, ...]:
    """The shape in which a padded matrix [strips * 64, chunks * 64] is put in `ORDER`."""
    return strips, 4, 2, 8, chunks, 4, 4, 2, 2


def fragment_floats(values: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """A matrix [out_features, cols] in fragment order, padded with zeros.

    Returns:
        uint8 [FLOATS.size_bytes(out_features, cols)], and block_scales, float32 [ceil(out_features / 64)].
    """
    out_features, cols = values.shape
    strips, chunks = -(-out_features // BLOCK), FLOATS.chunks(cols)
    padded = np.zeros((strips * BLOCK, chunks * BLOCK), np.float32)
    padded[:out_features, :cols] = values
    tops = np.abs(padded).reshape(strips, -1).max(axis=1)
    exponents = np.clip(np.where(tops > 0, 15 - np.frexp(tops)[1], 0), -100, 100)
    with np.errstate(under="ignore"):
        halves = np.ldexp(padded.reshape(strips, -1), exponents[:, None]).astype(np.float16)
    ordered = np.ascontiguousarray(halves.reshape(strip_axes(strips, chunks)).transpose(ORDER))
    return ordered.reshape(-1).view(np.uint8), np.ldexp(np.float32(1), -exponents).astype(np.float32)
