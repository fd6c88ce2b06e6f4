"""IQ4_NL and IQ4_XS: nibbles that index 16 unevenly spaced values. Layouts: ggml-common.h; formulas: ggml-quants.c.

Each function takes raw blocks, uint8 [out_features, blocks, type_size].
"""

from __future__ import annotations

import numpy as np

from realizar.quantization.fields import Bytes, bit_fields, columns, halves
from realizar.quantization.planes import Planes

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8)
"""int8 [16]: `kvalues_iq4nl` of ggml-common.h."""


def iq4_nl(blocks: Bytes) -> Planes:
    """d, then nibbles of 32 columns. Weight: d * value[q]."""
    codes = columns(bit_fields(blocks[..., 2:], 4, 16))
    return Planes(codes=codes, bits=4, offset=0, group_size=32, scales=halves(blocks, 0), codebook=IQ4_VALUES)


def iq4_xs(blocks: Bytes) -> Planes:
    """d, 16 high bits and 32 low bits of eight scales, nibbles of 256 columns. Weight: d * (s - 32) * value[q]."""
    scales = bit_fields(blocks[..., 4:8], 4, 1) | (bit_fields(blocks[..., 2:4], 2, 1) << np.uint8(4))
    return Planes(
        codes=columns(bit_fields(blocks[..., 8:], 4, 16)),
        bits=4,
        offset=0,
        group_size=32,
        scales=columns(scales.astype(np.int16)) - np.int16(32),
        super_group_size=256,
        super_scales=halves(blocks, 0),
        codebook=IQ4_VALUES,
    )
