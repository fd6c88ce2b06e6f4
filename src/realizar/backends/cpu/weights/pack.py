"""Matrices as the kernels read them: sources to tiles, by several threads. The layout of tiles stands in `formats`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.codegen.vector_codebook_tables import codebook_table
from realizar.backends.cpu.records import address, aligned_zeros
from realizar.backends.cpu.weights.formats import GROUP, WeightFormat, packed_format
from realizar.backends.cpu.weights.pack_planes import pack_planes
from realizar.backends.cpu.weights.repack import REPACKED, make_repack
from realizar.errors import UnsupportedModelError
from realizar.quantization import MatrixSource, WeightLayout

_PIECE_BYTES = 4 << 20  # of the file: what a thread packs before its pages are released


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A quantised matrix in tiles, or several of one shape, one after another.

    Attributes:
        out_features, in_features: as in the checkpoint; out_features are padded with zero weights to whole tiles.
        tiles: of one matrix.
        codes, scales, supers: uint8, 64-byte aligned; their sizes per tile follow from `weight_format`.
        table: uint8, the table that codes index, or None.
        count: matrices.
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

    @property
    def size_bytes(self) -> int:
        """Bytes of codes, scales and super-scales."""
        return int(self.codes.size + self.scales.size + self.supers.size)

    def part(self, index: int) -> PackedMatrix:
        """One of several matrices; its arrays are views."""
        arrays = (each.reshape(self.count, -1)[index] for each in (self.codes, self.scales, self.supers))
        codes, scales, supers = arrays
        return replace(self, codes=codes, scales=scales, supers=supers, count=1)

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


def allocate(layout: WeightLayout, out_features: int, cols: int, lanes: int, count: int = 1) -> PackedMatrix:
    """`count` matrices of zeros in the format of a layout.

    Raises:
        UnsupportedModelError: no kernel can express the layout, or the columns are not whole groups.
    """
    sizes = _sizes(layout, out_features, cols, lanes)
    codes, scales, supers = (aligned_zeros(count * size, np.uint8) for size in sizes)
    weight_format, tiles = packed_format(layout), -(-out_features // lanes)
    return PackedMatrix(weight_format, out_features, cols, tiles, codes, scales, supers, _table(layout), count)  # type: ignore[arg-type]


def packed_bytes(layout: WeightLayout, out_features: int, cols: int, lanes: int) -> int:
    """Bytes of a packed matrix of a layout.

    Raises:
        UnsupportedModelError: as in `allocate`.
    """
    return sum(_sizes(layout, out_features, cols, lanes))


def _sizes(layout: WeightLayout, out_features: int, cols: int, lanes: int) -> tuple[int, int, int]:
    """Bytes of codes, scales and super-scales."""
    weight_format, tiles = packed_format(layout), -(-out_features // lanes)
    if cols % GROUP:
        raise UnsupportedModelError(
            f"weights in the layout {layout.name} do not run on the CPU: {cols} columns are not a multiple of {GROUP}"
        )
    codes, scales = weight_format.codes_bytes(lanes, cols), weight_format.scales_bytes(lanes, cols)
    return tiles * codes, tiles * scales, tiles * weight_format.supers_bytes(lanes, cols)


def _table(layout: WeightLayout) -> NDArray[np.uint8] | None:
    """A codebook of 16 bytes, plus 128 to be unsigned, as often as the widest vector holds it; or one of vectors."""
    book = layout.codebook
    if book is None:
        return None
    if book.vector_size > 1:
        return codebook_table(book, layout.signs)
    return np.tile((book.load().astype(np.int16) + 128).astype(np.uint8), 4)


def pack(
    source: MatrixSource, lanes: int, pool: Executor | None = None, packed: Callable[[int, int], None] | None = None
) -> PackedMatrix:
    """Pack a matrix of codes; equal to what its `Planes` hold. Arguments as in `fill`.

    Raises:
        UnsupportedModelError: as in `allocate` and `fill`.
    """
    matrix = allocate(source.layout, source.out_features, source.in_features, lanes)
    fill(matrix, source, lanes, pool, packed)
    return matrix


def fill(
    matrix: PackedMatrix, source: MatrixSource, lanes: int, pool: Executor | None = None,
    packed: Callable[[int, int], None] | None = None,
) -> None:  # fmt: skip
    """Pack a matrix of codes into one of zeros, of the format of its layout.

    Args:
        lanes: out_features of a tile.
        pool: threads to spread tiles over; the calling thread alone if None.
        packed: called, by any thread, with the run of out_features that is done with.

    Raises:
        UnsupportedModelError: a layout that keeps its blocks comes without raw bytes.
    """
    raw = source.raw if source.layout in REPACKED else None
    if raw is not None:
        run = _repacked(source.layout, raw, matrix, lanes)
    elif matrix.weight_format.kept is None:
        run = _from_planes(source, matrix, lanes)
    else:
        raise UnsupportedModelError(
            f"weights in the layout {source.layout.name} run on the CPU only from their own blocks, which are missing"
        )
    over_tiles(matrix.tiles, source.out_features, lanes, source.row_bytes, run, pool, packed)


def _repacked(
    layout: WeightLayout, raw: NDArray[np.uint8], matrix: PackedMatrix, lanes: int
) -> Callable[[int, int], None]:
    """Packs runs of tiles by a compiled repacker."""
    repack, row_bytes = make_repack(REPACKED.index(layout), lanes), raw.strides[0]
    targets = address(matrix.codes), address(matrix.scales), address(matrix.supers)
    blocks = matrix.in_features // layout.block_size

    def run(first: int, stop: int) -> None:
        source = address(raw) + first * lanes * row_bytes
        repack(source, row_bytes, *targets, matrix.out_features, blocks, first, stop)

    return run


def _from_planes(source: MatrixSource, matrix: PackedMatrix, lanes: int) -> Callable[[int, int], None]:
    """Packs runs of tiles by numpy."""
    weight_format = matrix.weight_format
    codes, scales, supers = (array.reshape(matrix.tiles, -1) for array in (matrix.codes, matrix.scales, matrix.supers))

    def run(first: int, stop: int) -> None:
        planes = source.planes(first * lanes, min(stop * lanes, matrix.out_features))
        pack_planes(planes, weight_format, lanes, (codes[first:stop], scales[first:stop], supers[first:stop]))

    return run


def over_tiles(
    tiles: int, out_features: int, lanes: int, row_bytes: int, run: Callable[[int, int], None],
    pool: Executor | None, packed: Callable[[int, int], None] | None,
) -> None:  # fmt: skip
    """Call `run(first tile, last tile + 1)` for runs of tiles, on the pool's threads."""
    step = max(1, _PIECE_BYTES // (row_bytes * lanes))

    def piece(first: int) -> None:
        stop = min(first + step, tiles)
        run(first, stop)
        if packed is not None:
            packed(first * lanes, min(stop * lanes, out_features))

    for _ in (map if pool is None else pool.map)(piece, range(0, tiles, step)):
        pass
