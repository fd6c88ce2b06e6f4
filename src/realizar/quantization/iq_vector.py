"""IQ1, IQ2 and IQ3: indices into grids of vectors of 8 or 4 columns, with signs (IQ2, IQ3) or a shift (IQ1).

Layouts: ggml-common.h; formulas: ggml-quants.c. Each function takes raw blocks, uint8
[out_features, blocks, type_size], of 256 columns. Where ggml multiplies by `d * (0.5 + s) / 4`, here the
small scale is `2 s + 1` and the float `d / 8`: the same number, as powers of two are exact.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.quantization.fields import Bytes, bit_fields, columns, halves, words
from realizar.quantization.iq_grids import GridName, grid, shifted_iq1_grid
from realizar.quantization.planes import Planes

_QUARTER, _EIGHTH = np.float32(0.25), np.float32(0.125)


def iq2_xxs(blocks: Bytes) -> Planes:
    """d, then eight times four indices and a word of four 7-bit signs and a 4-bit scale. d * (0.5 + s) / 4 * grid."""
    pairs = words(blocks, 2, 66, "<u4").reshape(*blocks.shape[:-1], 8, 2)
    indices = np.ascontiguousarray(pairs[..., 0]).view(np.uint8)
    return _signed("iq2_xxs", indices, _four_signs(pairs[..., 1]), pairs[..., 1] >> 28, 32, _EIGHTH * halves(blocks, 0))


def iq2_xs(blocks: Bytes) -> Planes:
    """d, 32 words of a 9-bit index and a 7-bit sign, 16 scale nibbles. d * (0.5 + s) / 4 * grid."""
    packed = words(blocks, 2, 66, "<u2")
    signs = _even_signs()[packed >> 9]
    return _signed("iq2_xs", packed & 511, signs, bit_fields(blocks[..., 66:], 4, 1), 16, _EIGHTH * halves(blocks, 0))


def iq2_s(blocks: Bytes) -> Planes:
    """d, 32 index bytes, 32 sign bytes, 8 bytes of two high index bits, 16 scale nibbles. d * (0.5 + s) / 4 * grid."""
    indices = blocks[..., 2:34] | (bit_fields(blocks[..., 66:74], 2, 1).astype(np.uint16) << 8)
    return _signed(
        "iq2_s", indices, blocks[..., 34:66], bit_fields(blocks[..., 74:], 4, 1), 16, _EIGHTH * halves(blocks, 0)
    )


def iq3_xxs(blocks: Bytes) -> Planes:
    """d, 64 index bytes, eight words of four 7-bit signs and a 4-bit scale. d * (0.5 + s) / 2 * grid."""
    packed = words(blocks, 66, 98, "<u4")
    return _signed("iq3_xxs", blocks[..., 2:66], _four_signs(packed), packed >> 28, 32, _QUARTER * halves(blocks, 0))


def iq3_s(blocks: Bytes) -> Planes:
    """d, 64 index bytes, 64 ninth index bits, 32 sign bytes, 8 scale nibbles. d * (1 + 2 s) * grid."""
    indices = blocks[..., 2:66] | (bit_fields(blocks[..., 66:74], 1, 1).astype(np.uint16) << 8)
    scales = bit_fields(blocks[..., 106:], 4, 1)
    return _signed("iq3_s", indices, blocks[..., 74:106], scales, 32, halves(blocks, 0))


def iq1_s(blocks: Bytes) -> Planes:
    """d, 32 index bytes, eight words: four times three high index bits, a 3-bit scale, the sign of the shift.

    Weight: d * (2 s + 1) * (grid +- 0.125).
    """
    packed = words(blocks, 34, 50, "<u2")
    high = (packed[..., None] >> np.array([0, 3, 6, 9], dtype=np.uint16)) & np.uint16(7)
    minus = (packed >> 15)[..., None] << np.uint16(11)
    indices = blocks[..., 2:34] | ((high << np.uint16(8)) | minus).reshape(*blocks.shape[:-1], 32)
    return _shifted(indices, (packed >> 12) & np.uint16(7), 32, _EIGHTH * halves(blocks, 0))


def iq1_m(blocks: Bytes) -> Planes:
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
    return _shifted(indices, scales, 16, _EIGHTH * super_scales)


def _signed(
    name: GridName,
    indices: NDArray[np.integer[Any]],  # [out_features, blocks, 32 or 64]
    signs: Bytes,  # [out_features, blocks, 32]
    scales: NDArray[np.integer[Any]],  # [out_features, blocks, 256 / group_size], s of 2 s + 1
    group_size: int,
    super_scales: NDArray[np.float32],
) -> Planes:
    codebook = grid(name)
    return Planes(
        codes=columns(indices.astype(np.uint16)),
        bits=(len(codebook) - 1).bit_length(),
        offset=0,
        group_size=group_size,
        scales=_odd(scales),
        super_group_size=256,
        super_scales=super_scales,
        codebook=codebook,
        signs=columns(signs),
    )


def _shifted(
    indices: NDArray[np.integer[Any]],  # [out_features, blocks, 32], into the doubled grid
    scales: NDArray[np.integer[Any]],  # as in `_signed`
    group_size: int,
    super_scales: NDArray[np.float32],
) -> Planes:
    return Planes(
        codes=columns(indices.astype(np.uint16)),
        bits=12,
        offset=0,
        group_size=group_size,
        scales=_odd(scales),
        super_group_size=256,
        super_scales=super_scales,
        codebook=shifted_iq1_grid(),
    )


def _odd(scales: NDArray[np.integer[Any]]) -> NDArray[np.int16]:
    """2 s + 1 as int16 [out_features, groups]."""
    return columns(scales.astype(np.int16)) * np.int16(2) + np.int16(1)


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
