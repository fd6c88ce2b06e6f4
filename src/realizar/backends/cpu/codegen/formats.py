"""Packed weight formats: what a kernel must know to read a tile, and which format a layout is packed in.

A matrix [out_features, cols] is cut into tiles of `lanes` out_features; lane r of a vector belongs to the tile's
out_feature r. Three arrays:

    codes   [tiles, cols/32, vectors, lanes] int32: four consecutive columns of one out_feature in the bytes of a lane
    scales  [tiles, cols/32, 32/group, 1 or 2 (scale, minimum), lanes] of the small type
    supers  [tiles, cols/super, 1 or 2 (scale, minimum), lanes] float16 or float32, for two-level scales

Layouts with a codebook of vectors keep their blocks instead: codes [tiles, blocks, half-words of a block, lanes] int16.

Code bits lie in planes of 4, 2 and 1 bits (6 = 4 + 2, 5 = 4 + 1, 3 = 2 + 1). Word j of a group of 32 columns (columns
4 j .. 4 j + 3) lies, in a plane of b bits with v = b vectors, in vector j % v at bit b * (j // v) of every byte.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import Literal, cast

from realizar.backends.cpu.activation_layout import GROUP, OFFSET_SUMS
from realizar.backends.cpu.codegen.vector_codebook_blocks import KINDS
from realizar.errors import UnsupportedModelError
from realizar.quantization.layout import WeightLayout

SmallType = Literal["none", "f16", "i8", "u8", "u4", "e8m0", "e4m3"]

PLANES: dict[int, tuple[int, ...]] = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
SMALL_BYTES: dict[SmallType, int] = {"none": 0, "f16": 2, "i8": 1, "u8": 1, "u4": 1, "e8m0": 1, "e4m3": 1}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The storage of codes and scales in a packed matrix.

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
        kept: layout whose blocks of 256 columns are kept as they are, or None.
    """

    bits: int
    offset: int
    group: int
    small: SmallType
    minima: bool = False
    super_size: int = 0
    codebook: bool = False
    centred: bool = False
    kept: WeightLayout | None = None

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
        if self.kept is not None:
            return self.kept.row_bytes(cols) * lanes
        return cols // GROUP * self.vectors * lanes * 4

    def scales_bytes(self, lanes: int, cols: int) -> int:
        return cols // self.group * self.small_planes * lanes * SMALL_BYTES[self.small]

    def supers_bytes(self, lanes: int, cols: int) -> int:
        return cols // self.super_size * self.planes * lanes * 2 if self.super_size else 0


CHAINS = 4
"""Independent sums over columns k % 4, added in a fixed order, which hides the latency of fma. The columns of float
matrices are padded with zeros to a multiple of it."""
KEPT_LAYOUTS = tuple(KINDS)
"""Layouts whose blocks of 256 columns are kept as they are, since kernels read them so."""
_OFFSETS = (0, *OFFSET_SUMS)  # that a group of 32 can have
_NUMBERED: dict[int, WeightFormat] = {}


@cache
def packed_format(layout: WeightLayout) -> WeightFormat:
    """The format in which matrices of a layout are packed; UnsupportedModelError where no kernel can express it."""
    if layout in KINDS:
        return WeightFormat(8, 128, GROUP, "none", kept=layout)
    reason = _refusal(layout)
    if reason is not None:
        raise UnsupportedModelError(f"weights in the layout {layout.name} do not run on the CPU: {reason}")
    book, scale = layout.codebook is not None, cast("SmallType", layout.scale)
    offset = 128 if book else layout.offset
    if layout.super_group_size is None and (layout.centred or (scale == "f16" and layout.group_size > GROUP)):
        minima = layout.minimum and not layout.centred
        return WeightFormat(layout.bits, offset, GROUP, "none", minima, layout.group_size, book, layout.centred)
    group = min(layout.group_size, GROUP)  # wider groups repeat their scale
    return WeightFormat(layout.bits, offset, group, scale, layout.minimum, layout.super_group_size or 0, book)


def _refusal(layout: WeightLayout) -> str | None:
    one_level = layout.super_group_size is None
    small = ("f16", "e8m0", "e4m3") if one_level else ("i8", "u8", "u4")
    eight = layout.bits == 8 and layout.codebook is None
    offsets = (128,) if eight else _OFFSETS if layout.group_size > 16 else (0, 1, 2, 4, 8, 16, 32, 64)
    sizes = [layout.group_size, layout.super_group_size or layout.group_size]
    if layout.is_float:
        return "they have no codes"
    if layout.vector_size > 1:
        return f"no kernel reads its codebook of vectors, {layout.codebook.name if layout.codebook else ''}"
    if layout.codebook is not None and (layout.codebook.entries, layout.bits) != (16, 4):
        return f"its codebook has {layout.codebook.entries} entries, not 16"
    if layout.bits not in PLANES:
        return f"codes have {layout.bits} bits"
    if layout.offset not in offsets and layout.codebook is None:
        return f"codes of {layout.bits} bits have the offset {layout.offset}"
    if any(size % GROUP and size != 16 for size in sizes) or sizes[1] % sizes[0]:
        return f"groups have {layout.group_size} columns"
    if layout.scale not in small or (layout.scale == "u4" and not layout.minimum):
        return f"scales are of type {layout.scale}"
    if layout.minimum and layout.scale in ("e8m0", "e4m3"):
        return f"minima are of type {layout.scale}"
    if layout.centred and (layout.bits != 1 or not one_level or layout.scale != "f16"):
        return "codes are centred"
    return None


def format_number(weight_format: WeightFormat) -> int:
    """A format as a number, for use as a compile-time constant: equal in every process."""
    number = int.from_bytes(hashlib.sha256(repr(weight_format).encode()).digest()[:6])
    _NUMBERED[number] = weight_format
    return number


def format_at(number: int) -> WeightFormat:
    """The format of a number that `format_number` gave in this process."""
    return _NUMBERED[number]
