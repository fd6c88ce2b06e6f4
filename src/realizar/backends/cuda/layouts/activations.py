"""The two activation formats that quantised matmuls read, and numpy functions that build them. numpy only.

A matmul's input has `cols` columns, padded to a multiple of 64. Padding columns hold zero: buffers are allocated
zeroed and nobody writes there. Which of the two formats a step uses depends on its number of tokens alone
(`MatmulKernels.activation_format`), so that every matmul of a step reads the same one.

`int8`, for few tokens:

    codes  int8    [tokens, padded_cols]          row-major, columns in their natural order; rint(x / scale)
    terms  float32 [tokens, padded_cols / 16, 2]  per 16 columns: the scale, max|x| / 127 (0, and codes of 0, where that
                                                is 0), and scale * sum of the codes

A lane of the mat-vec has 16 columns, so scales per 16 cost nothing over scales per 32 and lose 12 to 18 % less. The
second term is what a weight's offset or minimum multiplies. It is the sum of the codes, not of x: with the exact
sum the rounding errors of codes no longer cancel.

`half`, for more tokens: float16 in the order of the tensor cores' B operand, by blocks of `block_tokens`:

    values      float16 [blocks, padded_cols / 64, 8, block_tokens / 8, 8, 8]
    token_scales  float32 [blocks * block_tokens]

Token m, column c lies at block m // block_tokens, chunk c // 64 and, with d = c % 64,

    [(d % 16) // 4 * 2 + d % 2, m % block_tokens // 8, m % 8, d // 16 * 2 + d % 4 // 2]

A token is divided by its `token_scales` entry, a power of two, and the matmul multiplies back. The entry is 1, unless
the token's largest value would overflow a half or is so small that halves lose it. The gated epilogue writes 64, since
it does not know a token's largest value in time. Tokens beyond the step's, up to the end of the block, may hold
anything: no token's result depends on another's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CHUNK = 64  # columns of a chunk: four steps of 16 of the tensor cores
GROUP = 16  # columns that share an int8 scale


def padded_cols(cols: int) -> int:
    return -(-cols // CHUNK) * CHUNK


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
    # Axes: block, eight rows, row; chunk, then a column's 16s, 4s, 2s and 1s.
    split = padded.astype(np.float16).reshape(blocks, block_tokens // 8, 8, -1, 4, 4, 2, 2)
    ordered = split.transpose(0, 3, 5, 7, 1, 2, 4, 6)
    return np.ascontiguousarray(ordered).reshape(blocks, -1, 8, block_tokens // 8, 8, 8), scales


def token_scales(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The power of two that each token is divided by: float32 [tokens].

    It brings the token's largest value below 2^14 if that is above, near 2^-4 if below 2^-8; between the two it is 1.
    """
    exponent = np.frexp(np.abs(x).max(axis=1))[1]  # the largest value lies in [2^(e-1), 2^e)
    shift = np.where(exponent > 14, exponent - 14, np.where((exponent < -8) & (exponent > -100), exponent + 4, 0))
    return np.ldexp(np.float32(1), shift).astype(np.float32)
