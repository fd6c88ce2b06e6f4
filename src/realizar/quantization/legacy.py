"""The simple types: one half-float scale, and for some a half-float minimum, per block of 32 to 128 columns.

Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, and the two youngest, Q1_0 and Q2_0. Layouts: ggml-common.h; formulas: ggml-quants.c.
Each function takes raw blocks, uint8 [out_features, blocks, type_size].
"""

from __future__ import annotations

import numpy as np

from realizar.quantization.fields import Bytes, bit_fields, columns, halves
from realizar.quantization.planes import Planes


def q4_0(blocks: Bytes) -> Planes:
    """d, then nibbles: column j low in byte j, column j + 16 high. Weight: d * (q - 8)."""
    codes = columns(bit_fields(blocks[..., 2:], 4, 16))
    return Planes(codes=codes, bits=4, offset=8, group_size=32, scales=halves(blocks, 0))


def q4_1(blocks: Bytes) -> Planes:
    """d, m, nibbles. Weight: d * q + m."""
    codes = columns(bit_fields(blocks[..., 4:], 4, 16))
    return Planes(codes=codes, bits=4, offset=0, group_size=32, scales=halves(blocks, 0), minima=halves(blocks, 2))


def q5_0(blocks: Bytes) -> Planes:
    """d, 32 fifth bits, nibbles. Weight: d * (q - 16)."""
    return Planes(codes=_five_bits(blocks, 2), bits=5, offset=16, group_size=32, scales=halves(blocks, 0))


def q5_1(blocks: Bytes) -> Planes:
    """d, m, 32 fifth bits, nibbles. Weight: d * q + m."""
    codes = _five_bits(blocks, 4)
    return Planes(codes=codes, bits=5, offset=0, group_size=32, scales=halves(blocks, 0), minima=halves(blocks, 2))


def _five_bits(blocks: Bytes, start: int) -> Bytes:
    """uint8 [out_features, cols] from the fifth bits at byte `start` and the nibbles after them."""
    codes = bit_fields(blocks[..., start + 4 :], 4, 16)
    codes |= bit_fields(blocks[..., start : start + 4], 1, 1) << np.uint8(4)
    return columns(codes)


def q8_0(blocks: Bytes) -> Planes:
    """d, then int8. Weight: d * q; the code is q + 128, which is q with its top bit turned over."""
    codes = columns(blocks[..., 2:]) ^ np.uint8(0x80)
    return Planes(codes=codes, bits=8, offset=128, group_size=32, scales=halves(blocks, 0))


def q1_0(blocks: Bytes) -> Planes:
    """d, then 128 bits, the first lowest. Weight: d where the bit is set, else -d; here 2d * q - d, which is exact.

    Only the sign of zero differs from ggml's, where d is zero.
    """
    scales = halves(blocks, 0)
    codes = columns(bit_fields(blocks[..., 2:], 1, 1))
    return Planes(codes=codes, bits=1, offset=0, group_size=128, scales=2 * scales, minima=-scales)


def q2_0(blocks: Bytes) -> Planes:
    """d, then 64 codes of two bits, the first lowest. Weight: d * (q - 1), so -d, 0, d or 2d."""
    codes = columns(bit_fields(blocks[..., 2:], 2, 1))
    return Planes(codes=codes, bits=2, offset=1, group_size=64, scales=halves(blocks, 0))
