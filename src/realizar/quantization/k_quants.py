"""The K types: blocks of 256 columns in groups of 16 or 32, whose scales are small integers times a half float.

Q2_K to Q6_K. Layouts: ggml-common.h; formulas: ggml-quants.c. Each function takes raw blocks, uint8
[out_features, blocks, type_size]. ggml subtracts `dmin * m`; `Planes` adds `-dmin * m`, the same bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from realizar.quantization.fields import Bytes, bit_fields, columns, halves, words
from realizar.quantization.planes import Planes


def q2_k(blocks: Bytes) -> Planes:
    """16 bytes of scale (low nibble) and minimum (high), 64 of codes, d, dmin. Weight: d*s*q - dmin*m."""
    scales = blocks[..., :16]
    return Planes(
        codes=columns(bit_fields(blocks[..., 16:80], 2, 32)),
        bits=2,
        offset=0,
        group_size=16,
        scales=_small(scales & np.uint8(15)),
        minima=_small(scales >> np.uint8(4)),
        super_group_size=256,
        super_scales=halves(blocks, 80),
        super_minima=-halves(blocks, 82),
    )


def q3_k(blocks: Bytes) -> Planes:
    """32 bytes of third bits, 64 of two low bits, 12 of scales, d. Weight: d * (s - 32) * (q - 4)."""
    codes = bit_fields(blocks[..., 32:96], 2, 32)
    codes |= bit_fields(blocks[..., :32], 1, 32) << np.uint8(2)
    # Scale i: four low bits in byte i % 8, nibble i / 8; two high bits in byte 8 + i % 4, field i / 4.
    scales = bit_fields(blocks[..., 96:104], 4, 8) | (bit_fields(blocks[..., 104:108], 2, 4) << np.uint8(4))
    return Planes(
        codes=columns(codes),
        bits=3,
        offset=4,
        group_size=16,
        scales=_small(scales) - np.int16(32),
        super_group_size=256,
        super_scales=halves(blocks, 108),
    )


def q4_k(blocks: Bytes) -> Planes:
    """d, dmin, 12 bytes of scales and minima, 128 of nibbles. Weight: d*s*q - dmin*m."""
    return _with_six_bit_scales(blocks, bit_fields(blocks[..., 16:], 4, 32), bits=4)


def q5_k(blocks: Bytes) -> Planes:
    """d, dmin, 12 bytes of scales and minima, 32 of fifth bits, 128 of nibbles. Weight: d*s*q - dmin*m."""
    codes = bit_fields(blocks[..., 48:], 4, 32)
    codes |= bit_fields(blocks[..., 16:48], 1, 32) << np.uint8(4)
    return _with_six_bit_scales(blocks, codes, bits=5)


def q6_k(blocks: Bytes) -> Planes:
    """128 bytes of low nibbles, 64 of two high bits, 16 int8 scales, d. Weight: (d*s) * (q - 32)."""
    codes = bit_fields(blocks[..., :128], 4, 64)
    codes |= bit_fields(blocks[..., 128:192], 2, 32) << np.uint8(4)
    return Planes(
        codes=columns(codes),
        bits=6,
        offset=32,
        group_size=16,
        scales=_small(words(blocks, 192, 208, "i1")),
        super_group_size=256,
        super_scales=halves(blocks, 208),
    )


def _small(values: NDArray[np.generic]) -> NDArray[np.int16]:
    """Small scales [out_features, blocks, n] as int16 [out_features, blocks * n]."""
    return columns(values.astype(np.int16))


def _with_six_bit_scales(blocks: Bytes, codes: Bytes, bits: int) -> Planes:
    """Q4_K and Q5_K: eight scales and eight minima of six bits in bytes 4 to 16.

    Bytes 0-3 hold scales 0-3 and bytes 4-7 minima 0-3, and in their top bits the top two of scales and minima 4-7;
    bytes 8-11 hold the low nibbles of those, scales low, minima high.
    """
    packed = blocks[..., 4:16]
    first, last = packed[..., :8], packed[..., 8:]
    top = (first >> np.uint8(2)) & np.uint8(0x30)
    low = first & np.uint8(0x3F)
    scales = np.concatenate([low[..., :4], (last & np.uint8(15)) | top[..., :4]], axis=-1)
    minima = np.concatenate([low[..., 4:], (last >> np.uint8(4)) | top[..., 4:]], axis=-1)
    return Planes(
        codes=columns(codes),
        bits=bits,
        offset=0,
        group_size=32,
        scales=_small(scales),
        minima=_small(minima),
        super_group_size=256,
        super_scales=halves(blocks, 0),
        super_minima=-halves(blocks, 2),
    )
