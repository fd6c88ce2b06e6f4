"""The activation formats that quantised matmuls read. numpy only.

A matmul's input has `cols` columns, padded to a multiple of 64. Padding columns hold zero: buffers are allocated
zeroed and nobody writes there. Which of the first two formats a step uses depends on its number of tokens alone
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

Blocks of one token, [tokens, padded_cols / 64, 8, 1, 1, 8], are what `native/grouped/lay.cu` lays in tiles: a token's
columns lie side by side.

Token m, column c lies at block m // block_tokens, chunk c // 64 and, with d = c % 64,

    [(d % 16) // 4 * 2 + d % 2, m % block_tokens // 8, m % 8, d // 16 * 2 + d % 4 // 2]

A token is divided by its `token_scales` entry, a power of two, and the matmul multiplies back. The entry brings the
token's largest value below 2^14 if that is above, near 2^-4 if below 2^-8; between the two it is 1. The gated epilogue
writes 64, since it does not know a token's largest value in time. Tokens beyond the step's, up to the end of the block,
may hold anything: no token's result depends on another's.

`fp8`, for long steps where it is asked for (`matmul.fp8`): bytes of e4m3 in the order of the tensor cores' A operand,
columns padded to a multiple of 128:

    codes  uint8    [blocks, padded_cols / 64, 4, block_tokens / 8, 8, 16]
    terms  float32  [blocks, padded_cols / 128, block_tokens]  the scale, max|x| / 448 of a token's 128 columns

Token m, column c lies at block m // block_tokens, chunk c // 64 and, with d = c % 64,

    [d // 16, m % block_tokens // 8, m % 8, d % 16]

and the scale of its columns at [m // block_tokens, c // 128, n], where n puts the two tokens of 16 that a lane adds up
near each other: with r = m % block_tokens, n = r // 16 * 16 + r % 8 // 2 * 4 + r % 16 // 8 * 2 + r % 2. Rows that
`lay.cu` lays in tiles have blocks of one token here too: a row's codes, then its scales elsewhere, lie side by side.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

CHUNK = 64  # columns of a chunk: four steps of 16 of the tensor cores


def padded_cols(cols: int) -> int:
    return -(-cols // CHUNK) * CHUNK


def half_order(x: NDArray[np.float16], block_tokens: int) -> NDArray[np.float16]:
    """[tokens, cols] of whole blocks and chunks -> values of the `half` format."""
    run = min(block_tokens, 8)
    # Axes: block, eight rows, row; chunk, then a column's 16s, 4s, 2s and 1s.
    split = x.reshape(-1, block_tokens // run, run, x.shape[1] // CHUNK, 4, 4, 2, 2)
    ordered = split.transpose(0, 3, 5, 7, 1, 2, 4, 6)
    return np.ascontiguousarray(ordered).reshape(*ordered.shape[:2], 8, block_tokens // run, run, 8)
