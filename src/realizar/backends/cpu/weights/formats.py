"""Packed weight formats: what a kernel must know to read a tile. Standard library only.

A matrix [rows, cols] is cut into tiles of `lanes` rows; lane r of a vector belongs to row r of the tile. Three arrays:

    codes   [tiles, cols/32, vectors, lanes] int32: four consecutive columns of one row in the bytes of a lane
    scales  [tiles, cols/32, 32/group, 1 or 2 (scale, minimum), lanes] of the small type
    supers  [tiles, cols/super, 1 or 2 (scale, minimum), lanes] float16 or float32, for two-level scales

The vector-codebook types keep their blocks instead: codes [tiles, blocks, half-words of a block, lanes] int16.

Code bits lie in planes of 4, 2 and 1 bits (6 = 4 + 2, 5 = 4 + 1, 3 = 2 + 1). Word j of a group of 32 columns (columns
4 j .. 4 j + 3) lies, in a plane of b bits with v = b vectors, in vector j % v at bit b * (j // v) of every byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from realizar.checkpoint.ggml_types import SUPER_BLOCK, GGMLType

GROUP = 32  # columns that share one activation scale
SmallType = Literal["none", "f16", "i8", "u8", "u4", "e8m0", "e4m3"]

PLANES: dict[int, tuple[int, ...]] = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
SMALL_BYTES: dict[SmallType, int] = {"none": 0, "f16": 2, "i8": 1, "u8": 1, "u4": 1, "e8m0": 1, "e4m3": 1}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a packed matrix stores codes and scales.

    Attributes:
        bits: stored width of a code.
        offset: integer subtracted from a code.
        group: columns per small scale: 16 or 32.
        small: type of the per-group scale; `none` where the super-scale is the scale. `u4` is a byte that holds the
            scale and, above it, the minimum.
        minima: whether a minimum follows each scale, in both levels.
        super_size: columns per super-scale (float16), 0 for one-level scales.
        codebook: whether codes index a table of 16 signed bytes (`offset` is then 128: the table stores value + 128).
        centred: whether codes 0 and 1 mean minus and plus the super-scale.
        blocks: ggml type whose blocks of 256 columns are kept as they are, or empty. block_bytes: their size.
    """

    bits: int
    offset: int
    group: int
    small: SmallType
    minima: bool = False
    super_size: int = 0
    codebook: bool = False
    centred: bool = False
    blocks: str = ""
    block_bytes: int = 0

    @property
    def vectors(self) -> int:
        """Code vectors per group of 32 columns."""
        return self.bits

    @property
    def planes(self) -> int:
        """Values stored per scale: scale alone, or scale and minimum."""
        return 2 if self.minima else 1

    @property
    def small_planes(self) -> int:
        """Stored vectors per small scale: nibbles share theirs."""
        return 1 if self.small == "u4" else self.planes

    @property
    def value_bits(self) -> int:
        """Width of what is multiplied: a codebook's table holds whole bytes."""
        return 8 if self.codebook else self.bits

    def codes_bytes(self, lanes: int, cols: int) -> int:
        """Bytes of codes per tile."""
        if self.blocks:
            return cols // SUPER_BLOCK * self.block_bytes * lanes
        return cols // GROUP * self.vectors * lanes * 4

    def scales_bytes(self, lanes: int, cols: int) -> int:
        """Bytes of small scales per tile."""
        return cols // self.group * self.small_planes * lanes * SMALL_BYTES[self.small]

    def supers_bytes(self, lanes: int, cols: int) -> int:
        """Bytes of super-scales per tile."""
        return cols // self.super_size * self.planes * lanes * 2 if self.super_size else 0


KEPT_TYPES = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
# Kernels take the position here as a compile-time constant.
FORMATS: dict[str, WeightFormat] = {
    "Q4_0": WeightFormat(4, 8, 32, "f16"),
    "Q4_1": WeightFormat(4, 0, 32, "f16", minima=True),
    "Q5_0": WeightFormat(5, 16, 32, "f16"),
    "Q5_1": WeightFormat(5, 0, 32, "f16", minima=True),
    "Q8_0": WeightFormat(8, 128, 32, "f16"),
    "Q2_K": WeightFormat(2, 0, 16, "u4", minima=True, super_size=256),
    "Q3_K": WeightFormat(3, 4, 16, "i8", super_size=256),
    "Q4_K": WeightFormat(4, 0, 32, "u8", minima=True, super_size=256),
    "Q5_K": WeightFormat(5, 0, 32, "u8", minima=True, super_size=256),
    "Q6_K": WeightFormat(6, 32, 16, "i8", super_size=256),
    "IQ4_NL": WeightFormat(4, 128, 32, "f16", codebook=True),
    "IQ4_XS": WeightFormat(4, 128, 32, "i8", super_size=256, codebook=True),
    "MXFP4": WeightFormat(4, 128, 32, "e8m0", codebook=True),
    "NVFP4": WeightFormat(4, 128, 16, "e4m3", codebook=True),
    "Q1_0": WeightFormat(1, 0, 32, "none", super_size=128, centred=True),
    "Q2_0": WeightFormat(2, 1, 32, "none", super_size=64),
    "TQ1_0": WeightFormat(2, 1, 32, "none", super_size=256),
    "TQ2_0": WeightFormat(2, 1, 32, "none", super_size=256),
    **{
        name: WeightFormat(8, 128, 32, "none", blocks=name, block_bytes=GGMLType[name].type_size) for name in KEPT_TYPES
    },
}
FORMAT_NAMES: tuple[str, ...] = tuple(FORMATS)


def format_at(index: int) -> WeightFormat:
    """The format of an index, as kernels hold it."""
    return FORMATS[FORMAT_NAMES[index]]


def index_of(name: str) -> int:
    """The index of a format, for use as a compile-time constant."""
    return FORMAT_NAMES.index(name)
