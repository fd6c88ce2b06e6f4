"""`GGMLType`: the element types of ggml with their ids in GGUF files and their block sizes. Standard library only.

Ids and block layouts are those of ggml's `ggml.h` and `ggml-common.h`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Self

SUPER_BLOCK = 256
"""Elements of a block of the K, IQ and TQ types."""


class GGMLType(IntEnum):
    """Every type id that a GGUF tensor may carry, with the elements of a block and the bytes that it takes.

    Plain numbers have a `block_size` of 1. A row is a whole number of blocks.
    """

    block_size: int
    type_size: int

    def __new__(cls, number: int, block_size: int = 1, type_size: int = 1) -> Self:
        member = int.__new__(cls, number)
        member._value_, member.block_size, member.type_size = number, block_size, type_size
        return member

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q8_0 = 8, 32, 34
    Q8_1 = 9, 32, 36
    Q2_K = 10, SUPER_BLOCK, 84
    Q3_K = 11, SUPER_BLOCK, 110
    Q4_K = 12, SUPER_BLOCK, 144
    Q5_K = 13, SUPER_BLOCK, 176
    Q6_K = 14, SUPER_BLOCK, 210
    Q8_K = 15, SUPER_BLOCK, 292
    IQ2_XXS = 16, SUPER_BLOCK, 66
    IQ2_XS = 17, SUPER_BLOCK, 74
    IQ3_XXS = 18, SUPER_BLOCK, 98
    IQ1_S = 19, SUPER_BLOCK, 50
    IQ4_NL = 20, 32, 18
    IQ3_S = 21, SUPER_BLOCK, 110
    IQ2_S = 22, SUPER_BLOCK, 82
    IQ4_XS = 23, SUPER_BLOCK, 136
    I8 = 24, 1, 1
    I16 = 25, 1, 2
    I32 = 26, 1, 4
    I64 = 27, 1, 8
    F64 = 28, 1, 8
    IQ1_M = 29, SUPER_BLOCK, 56
    BF16 = 30, 1, 2
    TQ1_0 = 34, SUPER_BLOCK, 54
    TQ2_0 = 35, SUPER_BLOCK, 66
    MXFP4 = 39, 32, 17
    NVFP4 = 40, 64, 36
    Q1_0 = 41, 128, 18
    Q2_0 = 42, 64, 18


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
