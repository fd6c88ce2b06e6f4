"""Packed weight formats: what a kernel must know to read a tile. Standard library only.

A matrix [rows, cols] is cut into tiles of `lanes` rows; lane r of a vector belongs to row r of the tile. Three arrays:

    codes   [tiles, cols/32, vectors, lanes] int32: four consecutive columns of one row in the bytes of a lane
    scales  [tiles, cols/32, 32/group, 1 or 2 (scale, minimum), lanes] of the small type
    supers  [tiles, cols/super, 1 or 2 (scale, minimum), lanes] float16 or float32, for two-level scales

Code bits lie in planes of 4, 2 and 1 bits (6 = 4 + 2, 5 = 4 + 1, 3 = 2 + 1). Word j of a group of 32 columns (columns
4 j .. 4 j + 3) lies, in a plane of b bits with v = b vectors, in vector j % v at bit b * (j // v) of every byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GROUP = 32  # columns that share one activation scale
SmallType = Literal["none", "f16", "f32", "i8", "u8", "e8m0", "e4m3"]

PLANES: dict[int, tuple[int, ...]] = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
SMALL_BYTES: dict[SmallType, int] = {"none": 0, "f16": 2, "f32": 4, "i8": 1, "u8": 1, "e8m0": 1, "e4m3": 1}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a packed matrix stores codes and scales.

    Attributes:
        bits: stored width of a code.
        offset: integer subtracted from a code.
        group: columns per small scale: 16 or 32.
        small: type of the per-group scale; `none` where the super-scale is the scale.
        minima: whether a minimum follows each scale, in both levels.
        super_size: columns per super-scale, 0 for one-level scales.
        super_bytes: 2 for float16, 4 for float32.
        codebook: whether codes index a table of 16 signed bytes (`offset` is then 128: the table stores value + 128).
    """

    bits: int
    offset: int
    group: int
    small: SmallType
    minima: bool = False
    super_size: int = 0
    super_bytes: int = 2
    codebook: bool = False

    @property
    def vectors(self) -> int:
        """Code vectors per group of 32 columns."""
        return self.bits

    @property
    def planes(self) -> int:
        """Values per scale: scale alone, or scale and minimum."""
        return 2 if self.minima else 1

    @property
    def value_bits(self) -> int:
        """Width of what is multiplied: a codebook's table holds whole bytes."""
        return 8 if self.codebook else self.bits

    def codes_bytes(self, lanes: int, cols: int) -> int:
        """Bytes of codes per tile."""
        return cols // GROUP * self.vectors * lanes * 4

    def scales_bytes(self, lanes: int, cols: int) -> int:
        """Bytes of small scales per tile."""
        return cols // self.group * self.planes * lanes * SMALL_BYTES[self.small]

    def supers_bytes(self, lanes: int, cols: int) -> int:
        """Bytes of super-scales per tile."""
        return cols // self.super_size * self.planes * lanes * self.super_bytes if self.super_size else 0


# Kernels take the position here as a compile-time constant.
FORMATS: dict[str, WeightFormat] = {
    "Q4_0": WeightFormat(4, 8, 32, "f16"),
    "Q4_1": WeightFormat(4, 0, 32, "f16", minima=True),
    "Q5_0": WeightFormat(5, 16, 32, "f16"),
    "Q5_1": WeightFormat(5, 0, 32, "f16", minima=True),
    "Q8_0": WeightFormat(8, 128, 32, "f16"),
    "Q2_K": WeightFormat(2, 0, 16, "u8", minima=True, super_size=256),
    "Q3_K": WeightFormat(3, 4, 16, "i8", super_size=256),
    "Q4_K": WeightFormat(4, 0, 32, "u8", minima=True, super_size=256),
    "Q5_K": WeightFormat(5, 0, 32, "u8", minima=True, super_size=256),
    "Q6_K": WeightFormat(6, 32, 16, "i8", super_size=256),
    "IQ4_NL": WeightFormat(4, 128, 32, "f16", codebook=True),
    "IQ4_XS": WeightFormat(4, 128, 32, "i8", super_size=256, codebook=True),
    "MXFP4": WeightFormat(4, 128, 32, "e8m0", codebook=True),
    "NVFP4": WeightFormat(4, 128, 16, "e4m3", codebook=True),
    "Q1_0": WeightFormat(1, 0, 32, "none", minima=True, super_size=128),
    "Q2_0": WeightFormat(2, 1, 32, "none", super_size=64),
    "TQ1_0": WeightFormat(2, 1, 32, "none", super_size=256),
    "TQ2_0": WeightFormat(2, 1, 32, "none", super_size=256),
}
FORMAT_NAMES: tuple[str, ...] = tuple(FORMATS)


def format_at(index: int) -> WeightFormat:
    return FORMATS[FORMAT_NAMES[index]]


def index_of(name: str) -> int:
    return FORMAT_NAMES.index(name)
