"""Weights that are NaN or infinite, found in the raw bytes of a tensor without dequantising it. numpy only.

A quantised weight is finite if the floats of its block are: codes and small scales are integers. So one field or two of
each block are read, where the bytes are read anyway, and plain numbers are looked at one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.checkpoint.ggml_types import GGMLType

HALF_FIELDS: dict[GGMLType, tuple[int, ...]] = {
    GGMLType.Q4_1: (0, 2),
    GGMLType.Q5_1: (0, 2),
    GGMLType.Q2_K: (80, 82),
    GGMLType.Q3_K: (108,),
    GGMLType.Q4_K: (0, 2),
    GGMLType.Q5_K: (0, 2),
    GGMLType.Q6_K: (208,),
    GGMLType.TQ1_0: (52,),
    GGMLType.TQ2_0: (64,),
    **dict.fromkeys((GGMLType.IQ1_M, GGMLType.MXFP4, GGMLType.NVFP4), ()),
}
"""Bytes of a block at which a float16 lies: its scale and minimum. Of types that are not here the scale comes first."""

_EXPONENTS: dict[GGMLType, tuple[str, int]] = {
    GGMLType.F32: ("<u4", 0x7F800000),
    GGMLType.F16: ("<u2", 0x7C00),
    GGMLType.BF16: ("<u2", 0x7F80),
}
_HALF = _EXPONENTS[GGMLType.F16]
LEAST_INFINITE_E8M0 = 253  # times the largest code beyond float32; 255 is NaN by the standard
_AT_ONCE = 1 << 15  # numbers, so that what is made of them stays in the cache


def find_not_finite(ggml_type: GGMLType, data: NDArray[np.uint8], first_block: int = 0) -> str | None:
    """The first weight that is NaN or infinite, as `the scale of block 3 is not finite`; None where all are finite.

    `data` is uint8 [size in bytes], whole blocks, contiguous; `first_block` is the number of the first of them in its
    tensor. A number of a float tensor is a block.
    """
    if ggml_type in _EXPONENTS:
        kind, mask = _EXPONENTS[ggml_type]
        place = _first(data.view(kind), mask)
        return None if place is None else f"number {first_block + place} is not finite"
    blocks = data.reshape(-1, ggml_type.type_size)
    for what, offset in zip(("scale", "minimum"), HALF_FIELDS.get(ggml_type, (0,)), strict=False):
        place = _first(_column(blocks, offset, _HALF[0]), _HALF[1])
        if place is not None:
            return f"the {what} of block {first_block + place} is not finite"
    place = None
    if ggml_type is GGMLType.MXFP4:
        found = np.flatnonzero(blocks[:, 0] >= LEAST_INFINITE_E8M0)
        place = int(found[0]) if found.size else None
    elif ggml_type is GGMLType.IQ1_M:
        place = _first_iq1_m(blocks)
    return None if place is None else f"the scale of block {first_block + place} is not finite"


def _column(blocks: NDArray[np.uint8], offset: int, kind: str) -> NDArray[Any]:
    """The numbers at one byte of every block, where they lie."""
    size = np.dtype(kind).itemsize
    if offset % size or blocks.shape[1] % size:
        return np.ascontiguousarray(blocks[:, offset : offset + size]).view(kind)[:, 0]
    return blocks.view(kind)[:, offset // size]


def _first(values: NDArray[Any], mask: int) -> int | None:
    """Index of the first number whose exponent is all ones."""
    ones = values.dtype.type(mask)
    for start in range(0, values.size, _AT_ONCE):
        exponents = values[start : start + _AT_ONCE] & ones
        if exponents.max() == ones:
            return start + int(np.flatnonzero(exponents == ones)[0])
    return None


def _first_iq1_m(blocks: NDArray[np.uint8]) -> int | None:
    """The scale's four nibbles are the highest of four words, the lowest first: its exponent is in the last two."""
    high = (blocks[:, 55] & 0xF0).astype(np.uint16) << 8 | (blocks[:, 53] & 0xF0).astype(np.uint16) << 4
    return _first(high, _HALF[1])
