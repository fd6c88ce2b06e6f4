"""Matrices as the kernels read them: raw blocks to tiles, by several threads. The layout stands in `formats`."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.codegen.vector_codebook_tables import codebook_table
from realizar.backends.cpu.records import address, aligned_zeros
from realizar.backends.cpu.weights.formats import FORMATS, GROUP, WeightFormat, index_of
from realizar.backends.cpu.weights.repack import make_repack
from realizar.checkpoint.ggml_types import GGMLType
from realizar.errors import UnsupportedModelError
from realizar.quantization.iq_linear import IQ4_VALUES
from realizar.quantization.microscaling import E2M1_DOUBLED

_PIECE_BYTES = 4 << 20  # of the file: what a thread packs before its pages are released
_CODEBOOKS = {"IQ4_NL": IQ4_VALUES, "IQ4_XS": IQ4_VALUES, "MXFP4": E2M1_DOUBLED, "NVFP4": E2M1_DOUBLED}


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A quantised matrix in tiles.

    Attributes:
        rows, cols: as in the checkpoint; rows are padded with zero weights to whole tiles.
        codes, scales, supers: uint8, 64-byte aligned; their sizes per tile follow from `weight_format`.
        table: uint8, the table that codes index, or None.
    """

    weight_format: WeightFormat
    rows: int
    cols: int
    tiles: int
    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    supers: NDArray[np.uint8]
    table: NDArray[np.uint8] | None

    @property
    def size_bytes(self) -> int:
        """Bytes of codes, scales and super-scales."""
        return int(self.codes.size + self.scales.size + self.supers.size)

    def fields(self, lanes: int) -> dict[str, int]:
        """Those of a product's record that tell where the matrix lies, by the names in `kernels.linear.LINEAR`."""
        form, cols = self.weight_format, self.cols
        return {
            "codes": address(self.codes), "scales": address(self.scales), "supers": address(self.supers),
            "table": address(self.table), "tiles": self.tiles, "groups": cols // GROUP,
            "codes_stride": form.codes_bytes(lanes, cols), "scales_stride": form.scales_bytes(lanes, cols),
            "supers_stride": form.supers_bytes(lanes, cols),
        }  # fmt: skip


def allocate(name: str, rows: int, cols: int, lanes: int) -> PackedMatrix:
    """A matrix of zeros in the format of a ggml type.

    Raises:
        UnsupportedModelError: the type has no packed format.
    """
    sizes = _sizes(name, rows, cols, lanes)
    codes, scales, supers = (aligned_zeros(size, np.uint8) for size in sizes)
    return PackedMatrix(FORMATS[name], rows, cols, -(-rows // lanes), codes, scales, supers, _table(name))  # type: ignore[arg-type]


def packed_bytes(name: str, rows: int, cols: int, lanes: int) -> int:
    """Bytes of a packed matrix of a ggml type.

    Raises:
        UnsupportedModelError: the type has no packed format.
    """
    return sum(_sizes(name, rows, cols, lanes))


def _sizes(name: str, rows: int, cols: int, lanes: int) -> tuple[int, int, int]:
    """Bytes of codes, scales and super-scales."""
    if name not in FORMATS:
        raise UnsupportedModelError(f"weights of type {name} do not run on the CPU")
    form, tiles = FORMATS[name], -(-rows // lanes)
    codes, scales = form.codes_bytes(lanes, cols), form.scales_bytes(lanes, cols)
    return tiles * codes, tiles * scales, tiles * form.supers_bytes(lanes, cols)


def _table(name: str) -> NDArray[np.uint8] | None:
    """A codebook of 16 bytes, plus 128 to be unsigned, as often as the widest vector holds it; or a grid's entries."""
    if FORMATS[name].blocks:
        return codebook_table(name)
    if name not in _CODEBOOKS:
        return None
    return np.tile((_CODEBOOKS[name].astype(np.int16) + 128).astype(np.uint8), 4)


def pack(
    ggml_type: GGMLType, data: NDArray[np.uint8], rows: int, cols: int, lanes: int,
    pool: Executor | None = None, packed: Callable[[int, int], None] | None = None,
) -> PackedMatrix:  # fmt: skip
    """Pack a matrix of any quantised type; equal to what its `Planes` hold.

    Args:
        data: uint8, the raw blocks, rows one after another.
        lanes: rows of a tile.
        pool: threads to spread tiles over; the calling thread alone if None.
        packed: called, by any thread, with the range of bytes of `data` that is done with.

    Raises:
        UnsupportedModelError: the type has no packed format.
    """
    matrix = allocate(ggml_type.name, rows, cols, lanes)
    repack = make_repack(index_of(ggml_type.name), lanes)
    data = np.ascontiguousarray(data)
    source, row_bytes = address(data), data.size // rows
    targets = address(matrix.codes), address(matrix.scales), address(matrix.supers)

    def piece(start: int, first: int, stop: int) -> None:
        repack(source + start, *targets, rows, cols // ggml_type.block_size, first, stop)

    over_tiles(matrix.tiles, rows, lanes, row_bytes, piece, pool, packed)
    return matrix


def over_tiles(
    tiles: int, rows: int, lanes: int, row_bytes: int, run: Callable[[int, int, int], None],
    pool: Executor | None, packed: Callable[[int, int], None] | None,
) -> None:  # fmt: skip
    """Call `run(first byte, first tile, last tile + 1)` for runs of tiles, on the pool's threads."""
    step = max(1, _PIECE_BYTES // (row_bytes * lanes))

    def piece(first: int) -> None:
        stop = min(first + step, tiles)
        start, end = first * lanes * row_bytes, min(stop * lanes, rows) * row_bytes
        run(start, first, stop)
        if packed is not None:
            packed(start, end)

    for _ in (map if pool is None else pool.map)(piece, range(0, tiles, step)):
        pass
