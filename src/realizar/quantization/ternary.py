"""TQ1_0 and TQ2_0: codes 0, 1, 2 (TQ2_0 can also hold 3), one half-float scale per 256 columns.

Layouts: ggml-common.h; formulas: ggml-quants.c. Each function takes raw blocks,
uint8 [out_features, blocks, type_size].
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from realizar.quantization.fields import Bytes, bit_fields, columns, halves
from realizar.quantization.planes import Planes


def tq1_0(blocks: Bytes) -> Planes:
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
    return Planes(codes=columns(codes), bits=2, offset=1, group_size=256, scales=halves(blocks, 52))


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


def tq2_0(blocks: Bytes) -> Planes:
    """64 bytes of two-bit codes, then d. Weight: d * (q - 1)."""
    codes = columns(bit_fields(blocks[..., :64], 2, 32))
    return Planes(codes=codes, bits=2, offset=1, group_size=256, scales=halves(blocks, 64))
