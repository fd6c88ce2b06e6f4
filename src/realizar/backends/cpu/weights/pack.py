"""Matrices as the kernels read them: sources to the tiles of `codegen.formats`, by several threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias

import numpy as np
from llvmlite import ir
from numba import types
from numpy.typing import NDArray

from realizar.backends.cpu.activation_layout import GROUP
from realizar.backends.cpu.codegen.emit import Emitter
from realizar.backends.cpu.codegen.float_tile import E4M3_POWER, FloatKind, float_kind, float_tile_bytes, runs_of_group
from realizar.backends.cpu.codegen.formats import (
    CHAINS,
    KEPT_LAYOUTS,
    PLANES,
    SMALL_BYTES,
    SmallType,
    WeightFormat,
    packed_format,
)
from realizar.backends.cpu.emitted import Value, emitted
from realizar.backends.cpu.kernel import Kernel, kernel
from realizar.backends.cpu.records import address, aligned_zeros
from realizar.backends.cpu.weights.repack_readers import READERS, WORDS, Fields
from realizar.errors import UnsupportedModelError
from realizar.quantization.layout import Codebook, WeightLayout
from realizar.quantization.microscaling import half_e4m3
from realizar.quantization.planes import Planes
from realizar.quantization.source import MatrixSource

_PIECE_BYTES = 4 << 20  # of the file: what a thread packs before its pages are released


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A quantised matrix in tiles, or `count` of one shape, one after another.

    Attributes:
        out_features, in_features: as in the checkpoint; out_features are padded with zero weights to whole tiles.
        tiles: of one matrix.
        codes, scales, supers: uint8, 64-byte aligned; their sizes per tile follow from `weight_format`.
        table: uint8, the table that codes index, or None.
        order: the column of the input that each column takes, int32 [in_features]; None where they are in place.
    """

    weight_format: WeightFormat
    out_features: int
    in_features: int
    tiles: int
    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    supers: NDArray[np.uint8]
    table: NDArray[np.uint8] | None
    count: int = 1
    order: NDArray[np.int32] | None = None

    @property
    def size_bytes(self) -> int:
        return int(self.codes.size + self.scales.size + self.supers.size)

    def part(self, index: int) -> PackedMatrix:
        """One of several matrices; its arrays are views."""
        arrays = (each.reshape(self.count, -1)[index] for each in (self.codes, self.scales, self.supers))
        codes, scales, supers = arrays
        return replace(self, codes=codes, scales=scales, supers=supers, count=1)

    def first(self, out_features: int, lanes: int) -> PackedMatrix:
        """Its first out_features, whole tiles of so many lanes; its arrays are views."""
        tiles = out_features // lanes
        parts = [each[: each.size // self.tiles * tiles] for each in (self.codes, self.scales, self.supers)]
        return replace(self, out_features=out_features, tiles=tiles, codes=parts[0], scales=parts[1], supers=parts[2])

    def fields(self, lanes: int) -> dict[str, int]:
        """Addresses of the first matrix for a matmul's record, by the names in `kernels.linear.LINEAR`."""
        weight_format, cols = self.weight_format, self.in_features
        return {
            "codes": address(self.codes), "scales": address(self.scales), "supers": address(self.supers),
            "table": address(self.table), "tiles": self.tiles, "groups": cols // GROUP,
            "codes_stride": weight_format.codes_bytes(lanes, cols),
            "scales_stride": weight_format.scales_bytes(lanes, cols),
            "supers_stride": weight_format.supers_bytes(lanes, cols),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class FloatMatrix:
    """A float matrix in tiles as `codegen.float_tile` has them, or `count` of one shape, one after another.

    Attributes:
        kind: element type, with the columns of a group of e4m3.
        columns: padded to a multiple of 4.
        tiles: of one matrix.
        weights: uint8, the bits of the numbers.
    """

    kind: FloatKind
    out_features: int
    columns: int
    tiles: int
    weights: NDArray[np.generic]
    count: int = 1

    @property
    def size_bytes(self) -> int:
        return int(self.weights.nbytes)

    @property
    def tile_bytes(self) -> int:
        return self.size_bytes // (self.count * self.tiles)

    def part(self, index: int) -> FloatMatrix:
        """One of several matrices; its weights are a view."""
        return replace(self, weights=self.weights.reshape(self.count, -1)[index], count=1)

    def first(self, out_features: int, lanes: int) -> FloatMatrix:
        """Its first out_features, whole tiles of so many lanes; its weights are a view."""
        tiles = out_features // lanes
        weights = self.weights[: self.weights.size // self.tiles * tiles]
        return replace(self, out_features=out_features, tiles=tiles, weights=weights)


Matrix: TypeAlias = PackedMatrix | FloatMatrix
Zeros: TypeAlias = Callable[[int, type[np.generic]], NDArray[np.generic]]
"""Makes one-dimensional arrays of so many zeros."""


def allocate(
    layout: WeightLayout, out_features: int, cols: int, lanes: int, count: int = 1, zeros: Zeros = aligned_zeros
) -> Matrix:
    """`count` matrices of zeros in the format of a layout; `zeros` makes their memory.

    Raises UnsupportedModelError where no kernel can express the layout, or the columns are not whole groups.
    """
    tiles = -(-out_features // lanes)
    if (kind := float_kind(layout)) is not None:
        columns = -(-cols // CHAINS) * CHAINS
        weights = zeros(count * tiles * float_tile_bytes(kind, columns, lanes), np.uint8)
        return FloatMatrix(kind, out_features, columns, tiles, weights, count)
    weight_format = packed_format(layout)
    if cols % GROUP:
        raise UnsupportedModelError(
            f"weights in the layout {layout.name} do not run on the CPU: {cols} columns are not a multiple of {GROUP}"
        )
    of_tile = weight_format.codes_bytes, weight_format.scales_bytes, weight_format.supers_bytes
    codes, scales, supers = (zeros(count * tiles * size(lanes, cols), np.uint8) for size in of_tile)
    return PackedMatrix(weight_format, out_features, cols, tiles, codes, scales, supers, _table(layout), count)  # type: ignore[arg-type]


def no_bytes(count: int, dtype: type[np.generic]) -> NDArray[np.generic]:
    """A one-dimensional array of zeros that takes no memory: all are one, which can't be written."""
    return np.broadcast_to(np.zeros(1, dtype), count)


def _table(layout: WeightLayout) -> NDArray[np.uint8] | None:
    """A codebook of 16 bytes, plus 128 to be unsigned, as often as the widest vector holds it; or one of vectors."""
    book = layout.codebook
    if book is None:
        return None
    if book.vector_size > 1:
        return _codebook_table(book, layout.signs)
    return np.tile((book.load().astype(np.int16) + 128).astype(np.uint8), 4)


def fill(
    matrix: Matrix, source: MatrixSource, lanes: int, pool: Executor | None = None,
    packed: Callable[[int, int], None] | None = None,
) -> None:  # fmt: skip
    """Pack a matrix into one of zeros, of the format of its layout; codes equal what its `Planes` hold.

    Args:
        pool: threads to spread tiles over; the calling thread alone if None.
        packed: called, by any thread, with the run of out_features that is done with.

    Raises:
        UnsupportedModelError: a layout that keeps its blocks comes without raw bytes.
    """
    raw = source.raw if source.layout in REPACKED else None
    if isinstance(matrix, FloatMatrix):
        run = (_transposed if source.layout.is_float else _scaled_floats)(source, matrix, lanes)
    elif raw is not None:
        run = _repacked(source.layout, raw, matrix, lanes)
    elif matrix.weight_format.kept is None:
        run = _from_planes(source, matrix, lanes)
    else:
        raise UnsupportedModelError(
            f"weights in the layout {source.layout.name} run on the CPU only from their own blocks, which are missing"
        )
    step = max(1, _PIECE_BYTES // (source.row_bytes * lanes))

    def piece(first: int) -> None:
        stop = min(first + step, matrix.tiles)
        run(first, stop)
        if packed is not None:
            packed(first * lanes, min(stop * lanes, source.out_features))

    for _ in (map if pool is None else pool.map)(piece, range(0, matrix.tiles, step)):
        pass


def _repacked(
    layout: WeightLayout, raw: NDArray[np.uint8], matrix: PackedMatrix, lanes: int
) -> Callable[[int, int], None]:
    repack, row_bytes = make_repack(REPACKED.index(layout), lanes).call, raw.strides[0]
    targets = address(matrix.codes), address(matrix.scales), address(matrix.supers)
    blocks = matrix.in_features // layout.block_size

    def run(first: int, stop: int) -> None:
        source = address(raw) + first * lanes * row_bytes
        repack(source, row_bytes, *targets, matrix.out_features, blocks, first, stop)

    return run


def _from_planes(source: MatrixSource, matrix: PackedMatrix, lanes: int) -> Callable[[int, int], None]:
    weight_format = matrix.weight_format
    codes, scales, supers = (array.reshape(matrix.tiles, -1) for array in (matrix.codes, matrix.scales, matrix.supers))

    def run(first: int, stop: int) -> None:
        planes = source.planes(first * lanes, min(stop * lanes, matrix.out_features))
        _pack_planes(planes, weight_format, lanes, (codes[first:stop], scales[first:stop], supers[first:stop]))

    return run


# Matrices to tiles from their `Planes`: the road of layouts whose own bytes no repacker reads. numpy only.
#
# It is also the specification of the compiled repacking, which gives the same bytes.

_Tiles = tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]
"""Codes, scales and super-scales of some tiles: uint8, zero before they are written."""


def _pack_planes(planes: Planes, weight_format: WeightFormat, lanes: int, tiles: _Tiles) -> None:
    """Write some out_features, whole tiles or the last of a matrix, into tiles of a format that keeps no blocks."""
    codes, scales, supers = tiles
    _write_codes(planes, weight_format, lanes, codes)
    small: tuple[NDArray[Any] | None, NDArray[Any] | None] = (planes.scales, planes.minima)
    if weight_format.super_size:
        large = (planes.super_scales, planes.super_minima) if weight_format.small != "none" else small
        if weight_format.centred:
            large = (planes.scales / 2, None)
        _write(large, supers, lanes, _half)
    if weight_format.small == "none":
        return
    repeat = max(1, planes.layout.group_size // GROUP)
    if weight_format.small == "u4" and planes.minima is not None:
        small = (planes.scales | planes.minima << 4, None)  # type: ignore[operator]
    wide = [None if values is None else np.repeat(values, repeat, axis=1) for values in small]
    _write((wide[0], wide[1]), scales, lanes, _CONVERTERS[weight_format.small])


def _write_codes(planes: Planes, weight_format: WeightFormat, lanes: int, target: NDArray[np.uint8]) -> None:
    count = -(-planes.out_features // lanes)
    codes = np.zeros((count * lanes, planes.in_features), np.uint8)
    codes[: planes.out_features] = planes.codes
    words = codes.reshape(count, lanes, planes.in_features // GROUP, 8, 4)
    out = target.reshape(count, planes.in_features // GROUP, weight_format.vectors, lanes, 4)
    first_vector, shift = 0, 0
    for bits in PLANES[weight_format.bits]:
        part = (words >> shift) & ((1 << bits) - 1)
        for word in range(8):
            place = bits * (word // bits)
            out[:, :, first_vector + word % bits] |= (part[:, :, :, word] << place).transpose(0, 2, 1, 3)
        first_vector, shift = first_vector + bits, shift + bits


def _write(
    values: tuple[NDArray[Any] | None, NDArray[Any] | None], target: NDArray[np.uint8], lanes: int,
    convert: Callable[[Any], NDArray[np.generic]],
) -> None:  # fmt: skip
    """Scales and minima [out_features, n] to [tiles, n, scale and minimum, lanes] of the converted type."""
    planes = [convert(value) for value in values if value is not None]
    out_features, count = planes[0].shape
    tiles = -(-out_features // lanes)
    out = target.view(planes[0].dtype).reshape(tiles, count, len(planes), lanes)
    for index, plane in enumerate(planes):
        padded = np.zeros((tiles * lanes, count), plane.dtype)
        padded[:out_features] = plane
        out[:, :, index] = padded.reshape(tiles, lanes, count).transpose(0, 2, 1)


def _half(values: NDArray[np.float32]) -> NDArray[np.float16]:
    return values.astype(np.float16)


def _byte(values: NDArray[np.int16]) -> NDArray[np.uint8]:
    return values.astype(np.uint8)


def _e8m0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Powers of two to their exponent plus 128."""
    exponents: NDArray[np.uint8] = (np.frexp(values)[1] + 127).astype(np.uint8)
    return exponents


def _e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Halves of the non-negative e4m3 numbers to their seven bits."""
    return np.searchsorted(half_e4m3()[:127], values).astype(np.uint8)


_CONVERTERS: dict[SmallType, Callable[[Any], NDArray[Any]]] = {
    "f16": _half, "i8": _byte, "u8": _byte, "u4": _byte, "e8m0": _e8m0, "e4m3": _e4m3,
}  # fmt: skip


# Raw blocks to tiles, compiled: one small function per layout that moves whole 32-bit words of codes.

REPACKED = (*READERS, *KEPT_LAYOUTS)
"""Layouts whose raw blocks are repacked. Kernels take the position here as a compile-time constant."""
_SIGNATURE = types.void(*[types.int64] * 9)


@emitted
def _repack_block(
    builder: Any, kind: int, lanes: int, source: Value, codes: Value, scales: Value, supers: Value
) -> None:
    """Move one block of layout number `kind` of REPACKED to its lane. Addresses, the lane's offset included."""
    layout = REPACKED[kind]
    e = Fields(builder, source)
    weight_format = packed_format(layout)
    if weight_format.kept is not None:
        for index in range(layout.block_bytes // 2):
            e.store(e.half_word(2 * index), e.at(codes, index * lanes * 2), 2)
        return
    reader = READERS[layout]
    for group in range(layout.block_size // GROUP):
        target = e.at(codes, weight_format.codes_bytes(lanes, GROUP * group))
        _store_codes(e, weight_format, reader.words(e, group), target, lanes)
    for index, value in enumerate(reader.small(e)):
        e.store(value, e.at(scales, index * lanes * SMALL_BYTES[weight_format.small]), 1)
    for index, value in enumerate(reader.supers(e)):  # one per block
        e.store(value, e.at(supers, index * lanes * 2), 2)


def _store_codes(e: Fields, weight_format: WeightFormat, words: Value, target: Value, lanes: int) -> None:
    """Split a group's eight words into planes of bits: the layout stands in `formats`."""
    vector, shift = 0, 0
    for bits in PLANES[weight_format.bits]:
        plane = e.field(words, shift, bits) if bits < 8 else words
        plane = e.b.shl(plane, e.lanes_of([bits * (word // bits) for word in range(WORDS)]))
        count = WORDS
        while count > bits:
            count //= 2
            lower, upper = (e.pick(plane, plane, range(start, start + count)) for start in (0, count))
            plane = e.b.or_(lower, upper)
        for index, value in enumerate(e.elements(plane)):
            e.store(value, e.at(target, (vector + index) * 4 * lanes), 4)
        vector, shift = vector + bits, shift + bits


@cache
def make_repack(kind: int, lanes: int) -> Kernel:
    """The repacker of layout REPACKED[kind]. Its arguments: source, row bytes, codes, scales, supers, out_features,
    blocks of each, first tile, last tile + 1.

    Addresses are those of the whole matrix, `source` that of the first tile's first out_feature; those of the source
    lie `row bytes` apart. Lanes beyond the last out_feature are left as they are.
    """
    layout = REPACKED[kind]
    weight_format, block_bytes, cols = packed_format(layout), layout.block_bytes, layout.block_size
    codes_bytes, scales_bytes = weight_format.codes_bytes(lanes, cols), weight_format.scales_bytes(lanes, cols)
    supers_bytes, small_bytes = weight_format.supers_bytes(lanes, cols), SMALL_BYTES[weight_format.small]
    code_bytes = 4 if weight_format.kept is None else 2

    @kernel(kind, lanes, signature=_SIGNATURE)
    def repack(
        source: int,
        row_bytes: int,
        codes: int,
        scales: int,
        supers: int,
        out_features: int,
        blocks: int,
        first: int,
        stop: int,
    ) -> None:
        for tile in range(first, stop):
            for lane in range(min(lanes, out_features - tile * lanes)):
                at = source + ((tile - first) * lanes + lane) * row_bytes
                for block in range(blocks):
                    index = tile * blocks + block
                    _repack_block(
                        kind, lanes, at + block * block_bytes, codes + index * codes_bytes + lane * code_bytes,
                        scales + index * scales_bytes + lane * small_bytes, supers + index * supers_bytes + lane * 2,
                    )  # fmt: skip

    return repack


@cache
def _codebook_table(book: Codebook, signs: bool) -> NDArray[np.uint8]:
    """uint8 [entries * vector_size]: the magnitudes of a codebook with signs.

    Without signs the codebook holds every entry of a grid shifted up, and then every one shifted down by two: the table
    has only the latter, plus 128, and kernels add the two.
    """
    entries: NDArray[Any] = book.load()
    if not signs:
        entries = entries[book.entries // 2 :].astype(np.int16) + np.int16(128)
    return np.ascontiguousarray(entries.astype(np.uint8)).reshape(-1)


# Float matrices to tiles, compiled.

_SMALL_E4M3 = np.isin(np.arange(256) & 0x7F, np.arange(1, 8))  # numbers with an exponent of 0, and not 0 themselves


def _transposed(source: MatrixSource, matrix: FloatMatrix, lanes: int) -> Callable[[int, int], None]:
    raw, out_features, cols = source.raw, source.out_features, source.in_features
    assert raw is not None  # every float matrix has its raw bytes
    transpose, row_bytes = make_transpose(source.layout.block_bytes, lanes).call, raw.strides[0]
    target, columns = address(matrix.weights), matrix.columns

    def run(first: int, stop: int) -> None:
        transpose(address(raw) + first * lanes * row_bytes, row_bytes, target, out_features, cols, columns, first, stop)

    return run


def _scaled_floats(source: MatrixSource, matrix: FloatMatrix, lanes: int) -> Callable[[int, int], None]:
    """Of e4m3, from planes: of each group its scales [lanes], with the flags, and its numbers [columns / 4, lanes, 4].

    A negative scale is made positive, and its numbers change their signs.
    """
    group, runs = source.layout.group_size, runs_of_group(matrix.kind, lanes)
    groups = matrix.columns // group
    tiles = matrix.weights.view(np.uint32).reshape(matrix.tiles, groups, 1 + group // 4, lanes)

    def run(first: int, stop: int) -> None:
        planes = source.planes(first * lanes, min(stop * lanes, matrix.out_features))
        count, scales = planes.out_features, np.ldexp(planes.group_scales(), E4M3_POWER)
        codes = np.zeros((stop - first, lanes, groups, group), np.uint8)
        own = codes.reshape(-1, groups, group)[:count]
        own[:] = planes.codes.reshape(own.shape)
        if (negative := np.signbit(scales)).any():
            own ^= (negative.view(np.uint8) << 7)[..., None]
        padded = np.zeros((stop - first, lanes, groups), np.float32)
        padded.reshape(-1, groups)[:count] = np.abs(scales)
        small = _SMALL_E4M3[codes].reshape(*padded.shape, runs, -1).any(axis=(1, 4))
        tiles[first:stop, :, 0] = padded.view(np.uint32).swapaxes(1, 2)
        tiles[first:stop, :, 0, :runs] |= small.astype(np.uint32) << 31
        tiles[first:stop, :, 1:] = codes.view(np.uint32).transpose(0, 2, 3, 1)

    return run


@cache
def make_transpose(size: int, lanes: int) -> Kernel:
    """Moves numbers of `size` bytes. Its arguments: address of the first tile's first out_feature, bytes from one to
    the next, target, out_features, columns of the source and of the target, first tile, last tile + 1."""

    @kernel(size, lanes, signature=types.void(*[types.int64] * 8))
    def transpose(
        source: int, row_bytes: int, target: int, out_features: int, cols: int, columns: int, first: int, stop: int
    ) -> None:
        for tile in range(first, stop):
            for lane in range(min(lanes, out_features - tile * lanes)):
                at = source + ((tile - first) * lanes + lane) * row_bytes
                to = target + (tile * columns * lanes + lane) * size
                for column in range(cols):
                    move(size, at + column * size, to + column * lanes * size)

    return transpose


@emitted
def move(builder: Any, size: int, source: Value, target: Value) -> None:
    """Copy `size` bytes. Addresses."""
    e = Emitter(builder, 1)
    e.store(e.load(source, ir.IntType(8 * size)), target, 1)
