"""Reading the fields of ggml blocks: half floats, little-endian words, packed bit fields. numpy only.

Everywhere here `blocks` is uint8 [out_features, blocks, type_size], the raw blocks of a matrix.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]
"""Raw bytes: [out_features, blocks, n] unless said otherwise."""


def halves(blocks: Bytes, start: int) -> NDArray[np.float32]:
    """The float16 field at byte `start`, as float32 [out_features, blocks]."""
    return words(blocks, start, start + 2, "<f2")[..., 0].astype(np.float32)


def words(blocks: Bytes, start: int, stop: int, dtype: str) -> NDArray[Any]:
    """Bytes `start` to `stop` of each block as numbers of `dtype`: [out_features, blocks, n]."""
    return np.ascontiguousarray(blocks[..., start:stop]).view(np.dtype(dtype))


def bit_fields(packed: Bytes, width: int, run: int) -> Bytes:
    """Unpack fields of `width` bits: uint8 [..., n] -> uint8 [..., n * 8 / width].

    Within each `run` of bytes, the lowest fields of all its bytes come first, then the next ones: ggml keeps columns
    that are `run` apart in one byte. A run of 1 is the plain order, least significant field first.
    """
    per_byte = 8 // width
    if run == 1:
        unpacked: Bytes = _field_table(width)[packed].view(np.uint8)
        return unpacked
    lead, size = packed.shape[:-1], packed.shape[-1]
    source = packed.reshape(*lead, size // run, run)
    fields = np.empty((*lead, size // run, per_byte, run), dtype=np.uint8)
    for index in range(per_byte):
        np.right_shift(source, np.uint8(index * width), out=fields[..., index, :])
    fields &= np.uint8((1 << width) - 1)
    return fields.reshape(*lead, size * per_byte)


@lru_cache
def _field_table(width: int) -> NDArray[np.unsignedinteger[Any]]:
    """For each byte its fields, one a byte, as one word: uint16, uint32 or uint64 [256]."""
    per_byte = 8 // width
    shifts = np.arange(per_byte, dtype=np.uint8) * np.uint8(width)
    fields = (np.arange(256, dtype=np.uint8)[:, None] >> shifts) & np.uint8((1 << width) - 1)
    return np.ascontiguousarray(fields).view(np.dtype(f"u{per_byte}"))[:, 0]
