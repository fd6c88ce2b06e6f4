"""`GGMLType`: the element types of ggml with their ids in GGUF files and their block sizes. Standard library only.

Ids and block layouts are those of ggml's `ggml.h` and `ggml-common.h`.
"""

from __future__ import annotations

from enum import IntEnum

SUPER_BLOCK = 256
"""Elements of a block of the K, IQ and TQ types."""


class GGMLType(IntEnum):
    """Every type id that a GGUF tensor may carry. A block of `block_size` elements takes `type_size` bytes."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42

    @property
    def block_size(self) -> int:
        """Elements of a block; 1 for plain numbers. A row is a whole number of blocks."""
        return _SIZES[self][0]

    @property
    def type_size(self) -> int:
        return _SIZES[self][1]


_SIZES: dict[GGMLType, tuple[int, int]] = {
    GGMLType.F32: (1, 4),
    GGMLType.F16: (1, 2),
    GGMLType.Q4_0: (32, 18),
    GGMLType.Q4_1: (32, 20),
    GGMLType.Q5_0: (32, 22),
    GGMLType.Q5_1: (32, 24),
    GGMLType.Q8_0: (32, 34),
    GGMLType.Q8_1: (32, 36),
    GGMLType.Q2_K: (SUPER_BLOCK, 84),
    GGMLType.Q3_K: (SUPER_BLOCK, 110),
    GGMLType.Q4_K: (SUPER_BLOCK, 144),
    GGMLType.Q5_K: (SUPER_BLOCK, 176),
    GGMLType.Q6_K: (SUPER_BLOCK, 210),
    GGMLType.Q8_K: (SUPER_BLOCK, 292),
    GGMLType.IQ2_XXS: (SUPER_BLOCK, 66),
    GGMLType.IQ2_XS: (SUPER_BLOCK, 74),
    GGMLType.IQ3_XXS: (SUPER_BLOCK, 98),
    GGMLType.IQ1_S: (SUPER_BLOCK, 50),
    GGMLType.IQ4_NL: (32, 18),
    GGMLType.IQ3_S: (SUPER_BLOCK, 110),
    GGMLType.IQ2_S: (SUPER_BLOCK, 82),
    GGMLType.IQ4_XS: (SUPER_BLOCK, 136),
    GGMLType.I8: (1, 1),
    GGMLType.I16: (1, 2),
    GGMLType.I32: (1, 4),
    GGMLType.I64: (1, 8),
    GGMLType.F64: (1, 8),
    GGMLType.IQ1_M: (SUPER_BLOCK, 56),
    GGMLType.BF16: (1, 2),
    GGMLType.TQ1_0: (SUPER_BLOCK, 54),
    GGMLType.TQ2_0: (SUPER_BLOCK, 66),
    GGMLType.MXFP4: (32, 17),
    GGMLType.NVFP4: (64, 36),
    GGMLType.Q1_0: (128, 18),
    GGMLType.Q2_0: (64, 18),
}

REMOVED_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
"""Ids that once had a meaning. Files with them no longer load anywhere."""
