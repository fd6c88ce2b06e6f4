"""From raw ggml blocks to `Planes` or float32, for every type that weights can have.

IQ1, IQ2 and IQ3 hold indices into grids of vectors of 8 or 4 columns, with signs (IQ2, IQ3) or a shift (IQ1). Layouts:
ggml-common.h; formulas: ggml-quants.c. Each function takes raw blocks, uint8 [out_features, blocks, type_size]. Where
ggml multiplies by `d * (0.5 + s) / 4`, here the small scale is `2 s + 1` and the float `d / 8`: the same number, as
powers of two are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.ggml_types import GGMLType
from realizar.errors import UnsupportedModelError
from realizar.quantization.fields import Bytes, bit_fields, halves, words
from realizar.quantization.ggml_layouts import GGML_LAYOUTS
from realizar.quantization.microscaling import half_e4m3, half_e8m0
from realizar.quantization.planes import Planes


class _Numbers(NamedTuple):
    """Arrays of `Planes`, [out_features, blocks, ...]."""

    codes: NDArray[np.integer[Any]]
    scales: NDArray[Any]
    minima: NDArray[Any] | None = None
    super_scales: NDArray[np.float32] | None = None
    super_minima: NDArray[np.float32] | None = None
    signs: Bytes | None = None


_QUARTER, _EIGHTH = np.float32(0.25), np.float32(0.125)


# TQ1_0 and TQ2_0: codes 0, 1, 2 (TQ2_0 can also hold 3), one half-float scale per 256 columns.
#
# Layouts: ggml-common.h; formulas: ggml-quants.c. Each function takes raw blocks, uint8 [out_features, blocks,
# type_size].


def _tq1_0(blocks: Bytes) -> _Numbers:
    """Five base-3 digits a byte: 48 bytes, then four a byte: 4 bytes, then d. Weight: d * (q - 1).

    The digits of a run of 32, then one of 16, then one of 4 bytes: first digits of all its bytes, then second ones.
    """
    table = _digit_table()
    codes = np.concatenate(
        [
            _digits(blocks[..., start:stop], table[:count])
            for start, stop, count in ((0, 32, 5), (32, 48, 5), (48, 52, 4))
        ],
        axis=-1,
    )
    return _Numbers(codes, halves(blocks, 52))


def _digits(packed: Bytes, table: Bytes) -> Bytes:
    """uint8 [out_features, blocks, n] -> [out_features, blocks, digits * n], by a table uint8 [digits, 256]."""
    digits = np.stack([row[packed] for row in table], axis=-2)
    return digits.reshape(*packed.shape[:-1], -1)


@lru_cache
def _digit_table() -> Bytes:
    """uint8 [5, 256]: digit n of a byte, a fraction of 256: the whole part of 3 * frac(byte * 3^n / 256)."""
    powers = np.array([[1], [3], [9], [27], [81]])
    digits: Bytes = ((np.arange(256) * powers % 256 * 3) >> 8).astype(np.uint8)
    return digits


def _tq2_0(blocks: Bytes) -> _Numbers:
    """64 bytes of two-bit codes, then d. Weight: d * (q - 1)."""
    return _Numbers(bit_fields(blocks[..., :64], 2, 32), halves(blocks, 64))


# The K types: blocks of 256 columns in groups of 16 or 32, whose scales are small integers times a half float.
#
# Q2_K to Q6_K. Layouts: ggml-common.h; formulas: ggml-quants.c. Each function takes raw blocks, uint8 [out_features,
# blocks, type_size]. ggml subtracts `dmin * m`; `Planes` adds `-dmin * m`, the same bits.


def _q2_k(blocks: Bytes) -> _Numbers:
    """16 bytes of scale (low nibble) and minimum (high), 64 of codes, d, dmin. Weight: d*s*q - dmin*m."""
    scales, codes = blocks[..., :16], bit_fields(blocks[..., 16:80], 2, 32)
    return _Numbers(
        codes, _small(scales & np.uint8(15)), _small(scales >> np.uint8(4)), halves(blocks, 80), -halves(blocks, 82)
    )


def _q3_k(blocks: Bytes) -> _Numbers:
    """32 bytes of third bits, 64 of two low bits, 12 of scales, d. Weight: d * (s - 32) * (q - 4)."""
    codes = bit_fields(blocks[..., 32:96], 2, 32)
    codes |= bit_fields(blocks[..., :32], 1, 32) << np.uint8(2)
    # Scale i: four low bits in byte i % 8, nibble i / 8; two high bits in byte 8 + i % 4, field i / 4.
    scales = bit_fields(blocks[..., 96:104], 4, 8) | (bit_fields(blocks[..., 104:108], 2, 4) << np.uint8(4))
    return _Numbers(codes, _small(scales) - np.int16(32), super_scales=halves(blocks, 108))


def _q4_k(blocks: Bytes) -> _Numbers:
    """d, dmin, 12 bytes of scales and minima, 128 of nibbles. Weight: d*s*q - dmin*m."""
    return _with_six_bit_scales(blocks, bit_fields(blocks[..., 16:], 4, 32))


def _q5_k(blocks: Bytes) -> _Numbers:
    """d, dmin, 12 bytes of scales and minima, 32 of fifth bits, 128 of nibbles. Weight: d*s*q - dmin*m."""
    codes = bit_fields(blocks[..., 48:], 4, 32)
    codes |= bit_fields(blocks[..., 16:48], 1, 32) << np.uint8(4)
    return _with_six_bit_scales(blocks, codes)


def _q6_k(blocks: Bytes) -> _Numbers:
    """128 bytes of low nibbles, 64 of two high bits, 16 int8 scales, d. Weight: (d*s) * (q - 32)."""
    codes = bit_fields(blocks[..., :128], 4, 64)
    codes |= bit_fields(blocks[..., 128:192], 2, 32) << np.uint8(4)
    return _Numbers(codes, _small(words(blocks, 192, 208, "i1")), super_scales=halves(blocks, 208))


def _small(values: NDArray[np.generic]) -> NDArray[np.int16]:
    return values.astype(np.int16)


def _with_six_bit_scales(blocks: Bytes, codes: Bytes) -> _Numbers:
    """Eight scales and eight minima of six bits in bytes 4 to 16.

    Bytes 0-3 hold scales 0-3 and bytes 4-7 minima 0-3, and in their top bits the top two of scales and minima 4-7;
    bytes 8-11 hold the low nibbles of those, scales low, minima high.
    """
    packed = blocks[..., 4:16]
    first, last = packed[..., :8], packed[..., 8:]
    top = (first >> np.uint8(2)) & np.uint8(0x30)
    low = first & np.uint8(0x3F)
    scales = np.concatenate([low[..., :4], (last & np.uint8(15)) | top[..., :4]], axis=-1)
    minima = np.concatenate([low[..., 4:], (last >> np.uint8(4)) | top[..., 4:]], axis=-1)
    return _Numbers(codes, _small(scales), _small(minima), halves(blocks, 0), -halves(blocks, 2))


# The simple types: one half-float scale, and for some a half-float minimum, per block of 32 to 128 columns.
#
# Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, and the two youngest, Q1_0 and Q2_0. Layouts: ggml-common.h; formulas: ggml-quants.c.
# Each function takes raw blocks, uint8 [out_features, blocks, type_size].


def _q4_0(blocks: Bytes) -> _Numbers:
    """d, then nibbles: column j low in byte j, column j + 16 high. Weight: d * (q - 8), or of IQ4_NL d * value[q]."""
    return _Numbers(bit_fields(blocks[..., 2:], 4, 16), halves(blocks, 0))


def _q4_1(blocks: Bytes) -> _Numbers:
    """d, m, nibbles. Weight: d * q + m."""
    return _Numbers(bit_fields(blocks[..., 4:], 4, 16), halves(blocks, 0), halves(blocks, 2))


def _q5_0(blocks: Bytes) -> _Numbers:
    """d, 32 fifth bits, nibbles. Weight: d * (q - 16)."""
    return _Numbers(_five_bits(blocks, 2), halves(blocks, 0))


def _q5_1(blocks: Bytes) -> _Numbers:
    """d, m, 32 fifth bits, nibbles. Weight: d * q + m."""
    return _Numbers(_five_bits(blocks, 4), halves(blocks, 0), halves(blocks, 2))


def _five_bits(blocks: Bytes, start: int) -> Bytes:
    """Codes from the fifth bits at byte `start` and the nibbles after them."""
    codes = bit_fields(blocks[..., start + 4 :], 4, 16)
    codes |= bit_fields(blocks[..., start : start + 4], 1, 1) << np.uint8(4)
    return codes


def _q8_0(blocks: Bytes) -> _Numbers:
    """d, then int8. Weight: d * q; the code is q + 128, which is q with its top bit turned over."""
    return _Numbers(blocks[..., 2:] ^ np.uint8(0x80), halves(blocks, 0))


def _q1_0(blocks: Bytes) -> _Numbers:
    """d, then 128 bits, the first lowest. Weight: d where the bit is set, else -d; here 2d * q - d, which is exact.

    Only the sign of zero differs from ggml's, where d is zero.
    """
    scales = halves(blocks, 0)
    return _Numbers(bit_fields(blocks[..., 2:], 1, 1), 2 * scales, -scales)


def _q2_0(blocks: Bytes) -> _Numbers:
    """d, then 64 codes of two bits, the first lowest. Weight: d * (q - 1), so -d, 0, d or 2d."""
    return _Numbers(bit_fields(blocks[..., 2:], 2, 1), halves(blocks, 0))


def _iq2_xxs(blocks: Bytes) -> _Numbers:
    """d, then eight times four indices and a word of four 7-bit signs and a 4-bit scale. d * (0.5 + s) / 4 * grid."""
    pairs = words(blocks, 2, 66, "<u4").reshape(*blocks.shape[:-1], 8, 2)
    indices = np.ascontiguousarray(pairs[..., 0]).view(np.uint8)
    return _vectors(indices, pairs[..., 1] >> 28, _EIGHTH * halves(blocks, 0), _four_signs(pairs[..., 1]))


def _iq2_xs(blocks: Bytes) -> _Numbers:
    """d, 32 words of a 9-bit index and a 7-bit sign, 16 scale nibbles. d * (0.5 + s) / 4 * grid."""
    packed = words(blocks, 2, 66, "<u2")
    scales, signs = bit_fields(blocks[..., 66:], 4, 1), _even_signs()[packed >> 9]
    return _vectors(packed & 511, scales, _EIGHTH * halves(blocks, 0), signs)


def _iq2_s(blocks: Bytes) -> _Numbers:
    """d, 32 index bytes, 32 sign bytes, 8 bytes of two high index bits, 16 scale nibbles. d * (0.5 + s) / 4 * grid."""
    indices = blocks[..., 2:34] | (bit_fields(blocks[..., 66:74], 2, 1).astype(np.uint16) << 8)
    return _vectors(indices, bit_fields(blocks[..., 74:], 4, 1), _EIGHTH * halves(blocks, 0), blocks[..., 34:66])


def _iq3_xxs(blocks: Bytes) -> _Numbers:
    """d, 64 index bytes, eight words of four 7-bit signs and a 4-bit scale. d * (0.5 + s) / 2 * grid."""
    packed = words(blocks, 66, 98, "<u4")
    return _vectors(blocks[..., 2:66], packed >> 28, _QUARTER * halves(blocks, 0), _four_signs(packed))


def _iq3_s(blocks: Bytes) -> _Numbers:
    """d, 64 index bytes, 64 ninth index bits, 32 sign bytes, 8 scale nibbles. d * (1 + 2 s) * grid."""
    indices = blocks[..., 2:66] | (bit_fields(blocks[..., 66:74], 1, 1).astype(np.uint16) << 8)
    return _vectors(indices, bit_fields(blocks[..., 106:], 4, 1), halves(blocks, 0), blocks[..., 74:106])


def _iq1_s(blocks: Bytes) -> _Numbers:
    """d, 32 index bytes, eight words: four times three high index bits, a 3-bit scale, the sign of the shift.

    Weight: d * (2 s + 1) * (grid +- 0.125).
    """
    packed = words(blocks, 34, 50, "<u2")
    high = (packed[..., None] >> np.array([0, 3, 6, 9], dtype=np.uint16)) & np.uint16(7)
    minus = (packed >> 15)[..., None] << np.uint16(11)
    indices = blocks[..., 2:34] | ((high << np.uint16(8)) | minus).reshape(*blocks.shape[:-1], 32)
    return _vectors(indices, (packed >> 12) & np.uint16(7), _EIGHTH * halves(blocks, 0))


def _iq1_m(blocks: Bytes) -> _Numbers:
    """32 index bytes, 32 nibbles of three high index bits and the sign of the shift, four words of scales.

    Each word holds four 3-bit scales and, on top, a nibble of d, the lowest first.
    Weight: d * (2 s + 1) * (grid +- 0.125).
    """
    # A nibble's four bits are exactly bits 8 to 11 of the index into the doubled grid.
    indices = blocks[..., :32] | (bit_fields(blocks[..., 32:48], 4, 1).astype(np.uint16) << 8)
    packed = words(blocks, 48, 56, "<u2")
    scales = (packed[..., None] >> np.array([0, 3, 6, 9], dtype=np.uint16)) & np.uint16(7)
    nibbles = (packed >> 12) << np.array([0, 4, 8, 12], dtype=np.uint16)
    super_scales = np.bitwise_or.reduce(nibbles, axis=-1).view(np.float16).astype(np.float32)
    return _vectors(indices, scales, _EIGHTH * super_scales)


def _vectors(
    indices: NDArray[np.integer[Any]],  # [out_features, blocks, 32 or 64], of IQ1 into the doubled grid
    scales: NDArray[np.integer[Any]],  # [out_features, blocks, 256 / group_size], s of 2 s + 1
    super_scales: NDArray[np.float32],
    signs: Bytes | None = None,  # [out_features, blocks, 32]
) -> _Numbers:
    odd = _small(scales) * np.int16(2) + np.int16(1)
    return _Numbers(indices.astype(np.uint16), odd, super_scales=super_scales, signs=signs)


def _four_signs(packed: NDArray[np.uint32]) -> Bytes:
    """The four 7-bit signs at the bottom of each word, completed: uint32 [..., 8] -> uint8 [..., 32]."""
    indices = (packed[..., None] >> np.array([0, 7, 14, 21], dtype=np.uint32)) & np.uint32(127)
    signs: Bytes = _even_signs()[indices].reshape(*packed.shape[:-1], 32)
    return signs


@lru_cache
def _even_signs() -> Bytes:
    """uint8 [128]: seven signs completed to eight so that an even number is set (`ksigns_iq2xs` of ggml-common.h)."""
    seven = np.arange(128, dtype=np.uint8)
    return seven | ((np.bitwise_count(seven) & np.uint8(1)) << np.uint8(7))


# Nibbles that index 16 unevenly spaced values, of IQ4, or numbers of four bits (E2M1) under an eight-bit float scale.


def _iq4_xs(blocks: Bytes) -> _Numbers:
    """d, 16 high bits and 32 low bits of eight scales, nibbles of 256 columns. Weight: d * (s - 32) * value[q]."""
    scales = bit_fields(blocks[..., 4:8], 4, 1) | (bit_fields(blocks[..., 2:4], 2, 1) << np.uint8(4))
    codes = bit_fields(blocks[..., 8:], 4, 16)
    return _Numbers(codes, _small(scales) - np.int16(32), super_scales=halves(blocks, 0))


def _mxfp4(blocks: Bytes) -> _Numbers:
    """One scale byte (E8M0: a power of two), then nibbles of 32 columns."""
    return _Numbers(bit_fields(blocks[..., 1:], 4, 16), half_e8m0()[blocks[..., 0]])


def _nvfp4(blocks: Bytes) -> _Numbers:
    """Four scale bytes (E4M3, its sign ignored), then nibbles of four groups of 16 columns."""
    return _Numbers(bit_fields(blocks[..., 4:], 4, 8), half_e4m3()[blocks[..., :4]])


_FAMILIES: dict[GGMLType, Callable[[Bytes], _Numbers]] = {
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q1_0: _q1_0,
    GGMLType.Q2_0: _q2_0,
    GGMLType.Q2_K: _q2_k,
    GGMLType.Q3_K: _q3_k,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
    GGMLType.IQ4_NL: _q4_0,
    GGMLType.IQ4_XS: _iq4_xs,
    GGMLType.IQ1_S: _iq1_s,
    GGMLType.IQ1_M: _iq1_m,
    GGMLType.IQ2_XXS: _iq2_xxs,
    GGMLType.IQ2_XS: _iq2_xs,
    GGMLType.IQ2_S: _iq2_s,
    GGMLType.IQ3_XXS: _iq3_xxs,
    GGMLType.IQ3_S: _iq3_s,
    GGMLType.TQ1_0: _tq1_0,
    GGMLType.TQ2_0: _tq2_0,
    GGMLType.MXFP4: _mxfp4,
    GGMLType.NVFP4: _nvfp4,
}

QUANTIZED_TYPES: tuple[GGMLType, ...] = tuple(_FAMILIES)
"""The types that `to_planes` takes. Q8_1 and Q8_K are activations' formats and never lie in a file."""

FLOAT_TYPES: tuple[GGMLType, ...] = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
"""The types that `dequantize` takes besides."""

_CHUNK_WEIGHTS = 1 << 20


def to_planes(ggml_type: GGMLType, data: NDArray[np.uint8], out_features: int, cols: int) -> Planes:
    """The exact `Planes` of a quantised matrix.

    Args:
        ggml_type: one of `QUANTIZED_TYPES`.
        data: uint8 [size in bytes], the out_features one after another, contiguous.
        cols: a whole number of blocks.

    Raises:
        UnsupportedModelError: for a type whose weights are not integer codes.
        ValueError: where `data` is not of the size that the shape asks for.
    """
    family = _FAMILIES.get(ggml_type)
    if family is None:
        raise UnsupportedModelError(f"weights of type {ggml_type.name} are not quantised codes")
    numbers = family(_as_blocks(ggml_type, data, out_features, cols))
    rows: list[Any] = [
        None if each is None else np.ascontiguousarray(each).reshape(out_features, -1) for each in numbers
    ]
    return Planes(GGML_LAYOUTS[ggml_type], *rows)


def dequantize(ggml_type: GGMLType, data: NDArray[np.uint8], out_features: int, cols: int) -> NDArray[np.float32]:
    """The weights as ggml's reference dequantisation gives them: float32 [out_features, cols], a new array.

    Takes `QUANTIZED_TYPES` and `FLOAT_TYPES`; arguments and errors as in `to_planes`. Works in runs of out_features, so
    that it needs little memory beside the result.
    """
    blocks = _as_blocks(ggml_type, data, out_features, cols)
    if ggml_type in FLOAT_TYPES:
        return _floats(ggml_type, blocks)
    weights = np.empty((out_features, cols), dtype=np.float32)
    step = max(1, _CHUNK_WEIGHTS // max(cols, 1))
    for start in range(0, out_features, step):
        part = blocks[start : start + step]
        weights[start : start + step] = to_planes(ggml_type, part, len(part), cols).dequantize()
    return weights


def _as_blocks(ggml_type: GGMLType, data: NDArray[np.uint8], out_features: int, cols: int) -> Bytes:
    """uint8 [out_features, blocks, type_size]."""
    blocks, rest = divmod(cols, ggml_type.block_size)
    if rest or data.size != out_features * blocks * ggml_type.type_size:
        raise ValueError(f"{data.size} bytes are not {out_features} output features of {cols} {ggml_type.name} weights")
    return data.reshape(out_features, blocks, ggml_type.type_size)


def _floats(ggml_type: GGMLType, elements: Bytes) -> NDArray[np.float32]:
    """uint8 [out_features, cols, bytes of a number] -> float32 [out_features, cols]."""
    out_features, cols, size = elements.shape
    flat = np.ascontiguousarray(elements).reshape(out_features, cols * size)
    if ggml_type is GGMLType.BF16:
        return (flat.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    return flat.view("<f4" if ggml_type is GGMLType.F32 else "<f2").astype(np.float32)
