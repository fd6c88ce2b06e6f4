"""Weights in the register order of the tensor cores: the layout that all matmul kernels share. numpy only.

A matrix [out_features, cols] is cut into blocks of 64 out_features by chunks of 64 columns. A block is four tiles of 16
out_features; in a tile a warp's lane 4 g + t (g in 0..7, t in 0..3) holds, of out_features g (half 0) and g + 8 (half
1), the 16 columns 16 t .. 16 t + 15 of the chunk. So a lane needs one scale per out_feature however small the groups,
and vectors of a codebook lie within a lane. The tensor cores' K index within a chunk is a permutation of the columns
(`layouts.activations`).

Memory: [out_features / 64][cols / 64] blocks; with two-level scales, super-scales of four chunks follow them. A block:

    code planes   each [tile 4][lane 32][bytes of a lane]; `FragmentFormat.planes` lists those bytes
    small scales  [tile 4][set][g 8][half 2][scale, or scale and minimum]; lane (g, t) reads set t * sets / 4
    super-scales  [tile 4][g 8][half 2][scale, or scale and minimum] float16, per 256 columns

With byte b of word j of a lane standing for column 16 t + 4 j + b:

    4-bit plane   16 bytes: word j, low nibble of byte b half 0, high nibble half 1; of a 16-entry codebook instead:
                  nibble i of word j is column 4 j + i of half 0, nibble 4 + i of half 1
    2-bit plane   8 bytes: word `half`, byte b, bits 2 j and 2 j + 1
    1-bit plane   4 bytes: byte b, bit 4 half + j
    8-bit plane   [tile 4][half 2][lane 32][16 bytes]
    vectors       low eight bits of the indices of half 0's vectors, then half 1's; signs, a byte per eight columns
                  likewise; the indices' high bits, one field after another, lowest first

A code of six bits is a 4-bit and a 2-bit plane, of five 4 + 1, of three 2 + 1. Kernels read a code at bit `position`
of a half float, where it is a subnormal number: code * 2^(position - 24). A float of four bits (E2M1) at bit 9 is a
half of that value too; one of eight (E4M3) at bit 7, its sign at bit 15, is 2^-8 of its value, as if at position 16.
So scales are stored times 2^(24 - position), and a single fused multiply-add gives a weight. All is times 2^e besides,
with e per block of 64 out_features such that the largest scale is just below 2^15; `block_scales` holds 2^-e, by which
a kernel multiplies its sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from realizar.errors import UnsupportedModelError
from realizar.quantization.layout import WeightLayout
from realizar.quantization.planes import Planes

BLOCK = 64  # out_features of a block and columns of a chunk
TILE = 16  # out_features of a tile
SUPER = 256  # columns that share super-scales
Small = Literal["f16", "f16_high", "u4_pair", "i8", "u4_odd", "none"]
SMALL_BYTES: dict[Small, int] = {"f16": 2, "f16_high": 1, "u4_pair": 1, "i8": 1, "u4_odd": 0, "none": 0}
PLANES: dict[int, tuple[int, ...]] = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}


@dataclass(frozen=True, slots=True)
class FragmentFormat:
    """The storage of a matrix's codes and scales; a kernel's source depends on it alone.

    Attributes:
        bits: width of a scalar code; 0 for vectors, 16 for halves, which have no scales: `fragment_floats`.
        offset: subtracted from a code: 0, or a power of two.
        sets: scales per out_feature and chunk: 1, 2 or 4.
        small: type of the scales in a block. `f16` are final, and so is `f16_high`, the upper byte of one that is a
            power of two from 2^-16 on. The others are integers that multiply super-scales: `u4_pair` scale
            and minimum, `i8` scale, `u4_odd` the n of scale 2 n + 1, `none` 1.
        minima: whether minima stand beside scales.
        codebook: whether codes index a table of 16 bytes.
        e2m1: whether that table has floats of four bits, doubled, which kernels make without it.
        e4m3: whether codes are floats of eight bits.
        vector: columns of a codebook vector: 0, 4 or 8.
        high_bits: bits of a vector's index beyond eight: 0, 1, 2 or 4.
        signs: whether vectors have signs.
    """

    bits: int
    offset: float
    sets: int
    small: Small
    minima: bool = False
    codebook: bool = False
    vector: int = 0
    high_bits: int = 0
    signs: bool = False
    e2m1: bool = False
    e4m3: bool = False

    @property
    def is_float(self) -> bool:
        """True for halves as they are, without scales."""
        return self.bits == 16

    @property
    def matvec_tokens(self) -> int:
        """Tokens up to which the mat-vec, which multiplies by codes, may read it: of more, it reads halves.

        Of e4m3 two take longer than the tensor cores do.
        """
        return 0 if self.is_float else 1 if self.e4m3 else 7

    @property
    def has_matvec(self) -> bool:
        return self.matvec_tokens > 0

    @property
    def reads_table(self) -> bool:
        return self.vector > 0 or (self.codebook and not self.e2m1)

    @property
    def two_level(self) -> bool:
        return self.small not in ("f16", "f16_high") and not self.is_float

    @property
    def planes(self) -> tuple[int, ...]:
        """Bits per lane of each code plane."""
        if self.is_float:
            return (32 * self.bits,)
        if self.vector:
            vectors = 32 // self.vector
            sizes = (8 * vectors, 32 if self.signs else 0, self.high_bits * vectors)
            return tuple(size for size in sizes if size)
        return tuple(32 * width for width in PLANES[self.bits])

    @property
    def positions(self) -> tuple[int, int]:
        """Bit of a half float at which the codes of each half of a tile stand."""
        if self.e2m1:
            return 9, 9
        if self.e4m3:
            return 16, 16
        if self.vector or self.codebook:
            return 0, 0
        return {1: (1, 1), 4: (0, 4), 5: (0, 4), 6: (0, 4)}.get(self.bits, (0, 0))

    @property
    def fp8_power(self) -> int:
        """Weights as kernels decode them, times two to this, fill the range of e4m3: up to 448."""
        if self.e4m3:
            return 0  # with the largest scale taken out
        if self.is_float:
            return -7
        largest = 12 if self.e2m1 else 128 if self.vector or self.codebook else max(self.offset, 1)
        if not self.offset:
            largest = 12 if self.e2m1 else (1 << self.bits) - 1
        return min(15, int(math.log2(448 / largest) + 9 - self.positions[0]))

    @property
    def codes_bytes(self) -> int:
        return sum(self.planes) * 16

    @property
    def tile_scale_bytes(self) -> int:
        """Bytes of small scales per tile."""
        if self.small == "u4_odd":
            return self.sets * 8
        pair = 2 if self.minima and self.small == "f16" else 1
        return self.sets * 16 * SMALL_BYTES[self.small] * pair

    @property
    def block_bytes(self) -> int:
        """Bytes of codes and small scales per block: a multiple of 16."""
        return self.codes_bytes + 4 * self.tile_scale_bytes

    @property
    def super_bytes(self) -> int:
        return (256 if self.minima else 128) if self.two_level else 0

    def chunks(self, cols: int) -> int:
        """Chunks that `cols` columns take: whole super-blocks with two-level scales."""
        unit = SUPER if self.two_level else BLOCK
        return -(-cols // unit) * (unit // BLOCK)

    def strip_bytes(self, cols: int) -> int:
        chunks = self.chunks(cols)
        return chunks * self.block_bytes + chunks // 4 * self.super_bytes

    def size_bytes(self, out_features: int, cols: int) -> int:
        """Bytes of a whole matrix, without `block_scales`."""
        return -(-out_features // BLOCK) * self.strip_bytes(cols)


FLOATS = FragmentFormat(16, 0.0, 1, "none")


def fragment_format(layout: WeightLayout) -> FragmentFormat:
    """The format for matrices of a layout, of codes, bf16 or fp16; UnsupportedModelError where none expresses it.

    Two-level scales stay where one level would cost more than an eighth more: of less than 4 bits.
    """
    if layout.float_type in ("bf16", "f16"):
        return FLOATS
    reason = _refusal(layout)
    if reason is not None:
        raise UnsupportedModelError(f"weights in the layout {layout.name} do not run on CUDA: {reason}")
    sets, two_level = max(1, BLOCK // layout.group_size), layout.super_group_size is not None
    if layout.vector_size > 1:
        high = _HIGH_BITS[layout.bits]
        return FragmentFormat(0, 128, sets, "u4_odd", vector=layout.vector_size, high_bits=high, signs=layout.signs)
    if layout.codebook is not None and layout.codebook.floats:
        return FragmentFormat(8, 0.0, sets, "f16", e4m3=True)
    if layout.codebook is not None:
        small: Small = "f16_high" if layout.scale == "e8m0" else "f16"
        e2m1 = layout.codebook.name == "e2m1"
        return FragmentFormat(4, 0 if e2m1 else 128, sets, small, codebook=True, e2m1=e2m1)
    if layout.centred:
        return FragmentFormat(1, 0.5, sets, "f16")
    offset = 0.0 if layout.minimum else float(layout.offset)  # minima have it
    if two_level and layout.bits < 4 and layout.scale in _SMALL_OF:
        return FragmentFormat(layout.bits, offset, sets, _SMALL_OF[layout.scale], layout.minimum)
    if layout.group_size == SUPER and not layout.minimum:
        return FragmentFormat(layout.bits, offset, 1, "none")
    return FragmentFormat(layout.bits, offset, sets, "f16", layout.minimum)


_HIGH_BITS = {8: 0, 9: 1, 10: 2, 12: 4}  # beyond eight, by the bits of a vector's index
_SMALL_OF: dict[str, Small] = {"u4": "u4_pair", "i8": "i8"}  # by the type of two-level scales


def _refusal(layout: WeightLayout) -> str | None:
    two_level = layout.super_group_size is not None
    if layout.is_float:
        return "float32 is not packed"
    supers = (None, SUPER) if layout.bits < 4 else (None, SUPER, layout.group_size)
    if layout.group_size not in (16, 32, 64, 128, SUPER) or layout.super_group_size not in supers:
        return f"groups have {layout.group_size} columns"
    if layout.vector_size > 1:
        known = layout.bits in _HIGH_BITS and layout.vector_size in (4, 8)
        if not known or not two_level or layout.minimum or layout.scale != "odd4":
            return f"no kernel reads its codebook of vectors with indices of {layout.bits} bits"
        return None
    if layout.codebook is not None:
        size = (256, 8) if layout.codebook.floats else (16, 4)
        known = (layout.codebook.entries, layout.bits, layout.minimum) == (*size, False)
        return None if known else f"its codebook has {layout.codebook.entries} entries, not {size[0]} without minima"
    if layout.bits not in PLANES or (layout.bits == 1) != layout.centred:
        return f"codes have {layout.bits} bits"
    kept = two_level and layout.bits < 4
    if layout.offset & (layout.offset - 1) or (kept and layout.minimum and layout.offset):
        return f"codes have the offset {layout.offset}"
    signed = layout.scale == "i8" and not (kept and layout.minimum)
    if two_level and not signed and not (layout.scale in ("u4", "u8") and layout.minimum):
        return f"scales are of type {layout.scale}"
    return None


def pack_fragments(planes: Planes, weight_format: FragmentFormat) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """A matrix in fragment order, out_features and columns padded with weights of zero; and `block_scales`.

    They are uint8 [weight_format.size_bytes(out_features, cols)] and float32 [ceil(out_features / 64)].
    """
    strips, chunks = -(-planes.out_features // BLOCK), weight_format.chunks(planes.in_features)
    exponents = _exponents(planes, weight_format, strips)
    parts = _code_planes(planes, weight_format, strips, chunks)
    if weight_format.small != "none":
        parts.append(_small_scales(planes, weight_format, strips, chunks, exponents))
    blocks = np.concatenate([part.reshape(strips, chunks, -1) for part in parts], axis=2)
    if weight_format.two_level:
        supers = _super_scales(planes, weight_format, strips, chunks // 4, exponents)
        blocks = np.concatenate([blocks.reshape(strips, chunks // 4, -1), supers], axis=2)
    return blocks.reshape(-1), np.ldexp(np.float32(1), -exponents).astype(np.float32)


def _exponents(planes: Planes, weight_format: FragmentFormat, strips: int) -> NDArray[np.int32]:
    """e of 2^e per block of out_features: int32 [strips]."""

    def largest(values: NDArray[np.float32]) -> NDArray[np.int32]:
        """x such that all values of a strip are below 2^x."""
        tops = np.zeros(strips * BLOCK, dtype=np.float32)
        tops[: planes.out_features] = np.abs(values).max(axis=1)
        strip_tops = tops.reshape(strips, BLOCK).max(axis=1)
        return np.where(strip_tops > 0, np.frexp(strip_tops)[1], -200).astype(np.int32)

    exponents = 15 - 24 + weight_format.positions[0] - largest(planes.group_scales())
    minima = _minima(planes) if weight_format.minima else None
    if minima is not None:
        exponents = np.minimum(exponents, 15 - largest(minima))
    return np.clip(exponents, -100, 100).astype(np.int32)


def _minima(planes: Planes) -> NDArray[np.float32] | None:
    """One-level minima with the offset of the codes, of which kernels subtract none where they add minima."""
    minima, offset = planes.group_minima(), planes.layout.offset
    return minima if minima is None or not offset else minima - np.float32(offset) * planes.group_scales()


def _tiled(values: NDArray[Any], strips: int, chunks: int, per_chunk: int) -> NDArray[Any]:
    """[out_features, columns of something] zero-padded to [strips, tile, half, g, chunks, per_chunk]."""
    padded = np.zeros((strips * BLOCK, chunks * per_chunk), dtype=values.dtype)
    padded[: values.shape[0], : values.shape[1]] = values
    return padded.reshape(strips, 4, 2, 8, chunks, per_chunk)


def _code_planes(planes: Planes, weight_format: FragmentFormat, strips: int, chunks: int) -> list[NDArray[np.uint8]]:
    """Code planes, each [strips, chunks, 4, 32, bytes of a lane] or [.., 4, 2, 32, 16] for eight bits."""
    if weight_format.vector:
        return _vector_planes(planes, weight_format, strips, chunks)
    # Axes of `codes`: strip, tile, half, g, chunk, t, j, b. Padding keeps code 0: its scale is 0.
    codes = _tiled(planes.codes.astype(np.uint8), strips, chunks, BLOCK).reshape(strips, 4, 2, 8, chunks, 4, 4, 4)
    low, high = codes[:, :, 0], codes[:, :, 1]  # [strip, tile, g, chunk, t, j, b]
    order = (0, 3, 1, 2, 4, 5, 6)
    found: list[NDArray[np.uint8]] = []
    shift = 0
    for width in PLANES[weight_format.bits]:
        if width == 8:
            plane = codes.transpose(0, 4, 1, 2, 3, 5, 6, 7)
        elif weight_format.codebook:
            nibbles = np.concatenate([low, high], axis=-1).transpose(order)
            plane = nibbles[..., 0::2] | nibbles[..., 1::2] << np.uint8(4)
        elif width == 4:
            plane = ((low & np.uint8(15)) | (high & np.uint8(15)) << np.uint8(4)).transpose(order)
        else:
            fields = (codes >> np.uint8(shift)) & np.uint8((1 << width) - 1)
            steps = np.arange(4, dtype=np.uint8) * np.uint8(width)
            halves = np.bitwise_or.reduce(fields << steps[:, None], axis=-2)  # [strip, tile, half, g, chunk, t, b]
            if width == 2:
                plane = halves.transpose(0, 4, 1, 3, 5, 2, 6)
            else:
                plane = (halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)).transpose(0, 3, 1, 2, 4, 5)
        found.append(np.ascontiguousarray(plane))
        shift += width
    return found


def _vector_planes(planes: Planes, weight_format: FragmentFormat, strips: int, chunks: int) -> list[NDArray[np.uint8]]:
    """Planes of a vector codebook: low bits of indices, signs, high bits."""
    per_lane = 16 // weight_format.vector

    def lanes(values: NDArray[Any], count: int) -> NDArray[Any]:
        """[out_features, count per 16 columns] -> [strip, chunk, tile, g, t, half, count]."""
        return _tiled(values, strips, chunks, 4 * count).reshape(strips, 4, 2, 8, chunks, 4, count).transpose(
            0, 4, 1, 3, 5, 2, 6
        )  # fmt: skip

    indices = lanes(planes.codes, per_lane)
    found = [np.ascontiguousarray(indices.astype(np.uint8))]
    if planes.signs is not None:
        found.append(np.ascontiguousarray(lanes(planes.signs, 2)))
    if weight_format.high_bits:
        fields = np.ascontiguousarray(indices >> 8).astype(np.uint8)
        bits = np.unpackbits(fields.reshape(-1, 1), axis=1, count=weight_format.high_bits, bitorder="little")
        found.append(np.packbits(bits.reshape(-1), bitorder="little"))
    return found


def _placed(
    values: NDArray[np.float32], weight_format: FragmentFormat, exponents: NDArray[np.int32]
) -> NDArray[np.float16]:
    """Scales [strip, tile, half, ...] as stored: float16, times 2^e and 2^(24 - position)."""
    shape = (len(exponents), 1, 2) + (1,) * (values.ndim - 3)
    shifts = exponents[:, None] + 24 - np.array(weight_format.positions)
    with np.errstate(under="ignore"):
        placed: NDArray[np.float16] = np.ldexp(values, shifts.reshape(shape)).astype(np.float16)
    return placed


def _lowered(values: NDArray[np.float32], exponents: NDArray[np.int32]) -> NDArray[np.float16]:
    """Minima [strip, ...] as stored: float16, times 2^e."""
    with np.errstate(under="ignore"):
        lowered: NDArray[np.float16] = np.ldexp(values, exponents.reshape(-1, *(1,) * (values.ndim - 1))).astype(
            np.float16
        )
    return lowered


def _small_scales(
    planes: Planes, weight_format: FragmentFormat, strips: int, chunks: int, exponents: NDArray[np.int32]
) -> NDArray[np.uint8]:
    """[strips, chunks, tile, set, g, half, scale and minimum] as bytes."""

    def tiled(values: NDArray[Any]) -> NDArray[Any]:
        repeat = max(1, planes.layout.group_size // BLOCK)  # groups wider than a chunk
        return _tiled(np.repeat(values, repeat, axis=1), strips, chunks, weight_format.sets)

    order = (0, 4, 1, 5, 3, 2)  # to strip, chunk, tile, set, g, half
    if not weight_format.two_level:
        scales = _placed(tiled(planes.group_scales()), weight_format, exponents).transpose(order)
        minima = _minima(planes) if weight_format.minima else None
        if minima is not None:
            scales = np.stack([scales, _lowered(tiled(minima), exponents).transpose(order)], axis=-1)
        stored = np.ascontiguousarray(scales)
        if weight_format.small == "f16_high":
            return (stored.view(np.uint16) >> 8).astype(np.uint8)
        return stored.view(np.uint8)
    small = tiled(planes.scales.astype(np.int16)).transpose(order)
    if weight_format.small == "u4_odd":
        nibbles = np.maximum(small >> 1, 0).astype(np.uint8)
        return np.ascontiguousarray(nibbles[..., 0] | nibbles[..., 1] << np.uint8(4))
    if planes.minima is None or not weight_format.minima:
        return np.ascontiguousarray(small.astype(np.int8)).view(np.uint8)
    small_minima = tiled(planes.minima.astype(np.int16)).transpose(order)
    return np.ascontiguousarray((small | small_minima << 4).astype(np.uint8))


def _super_scales(
    planes: Planes, weight_format: FragmentFormat, strips: int, supers: int, exponents: NDArray[np.int32]
) -> NDArray[np.uint8]:
    """[strips, supers, bytes]: per super-block [tile, g, half, scale and minimum]."""
    order = (0, 4, 1, 3, 2, 5)
    source = planes.scales.astype(np.float32) if planes.super_scales is None else planes.super_scales
    found = [_placed(_tiled(source, strips, supers, 1), weight_format, exponents).transpose(order)]
    if weight_format.minima and planes.super_minima is not None:
        found.append(_lowered(_tiled(planes.super_minima, strips, supers, 1), exponents).transpose(order))
    return np.ascontiguousarray(np.concatenate(found, axis=-1)).reshape(strips, supers, -1).view(np.uint8)


# A block of 64 out_features by a chunk of 64 columns is [tile 4][step 4][lane 32][16 bytes]: what a lane holds for one
# matrix instruction, columns 16 t + 4 step + 0 .. 3 of out_features g (half 0) and g + 8 (half 1) of its tile, as four
# pairs. Pair 2 H + half has columns H and H + 2 of the four.
#
# Each 64 out_features are multiplied by a power of two, such that the largest weight is just below 2^15, and
# `block_scales` divides the sums again. So fp16 weights lose nothing, nor do bf16 weights whose size is within 2^-32 of
# the largest of their 64 out_features; smaller ones are rounded to 2^-39 of it.

ORDER = 0, 4, 1, 6, 3, 5, 8, 2, 7
"""Of a strip's axes [strip, tile, half, g, chunk, t, step, pair, H], to those in memory."""


def strip_axes(strips: int, chunks: int) -> tuple[int, ...]:
    """The shape in which a padded matrix [strips * 64, chunks * 64] is put in `ORDER`."""
    return strips, 4, 2, 8, chunks, 4, 4, 2, 2


def fragment_floats(values: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """A matrix [out_features, cols] in the format `FLOATS`, as of `pack_fragments`."""
    out_features, cols = values.shape
    strips, chunks = -(-out_features // BLOCK), FLOATS.chunks(cols)
    padded = np.zeros((strips * BLOCK, chunks * BLOCK), np.float32)
    padded[:out_features, :cols] = values
    tops = np.abs(padded).reshape(strips, -1).max(axis=1)
    exponents = np.clip(np.where(tops > 0, 15 - np.frexp(tops)[1], 0), -100, 100)
    with np.errstate(under="ignore"):
        halves = np.ldexp(padded.reshape(strips, -1), exponents[:, None]).astype(np.float16)
    ordered = np.ascontiguousarray(halves.reshape(strip_axes(strips, chunks)).transpose(ORDER))
    return ordered.reshape(-1).view(np.uint8), np.ldexp(np.float32(1), -exponents).astype(np.float32)
