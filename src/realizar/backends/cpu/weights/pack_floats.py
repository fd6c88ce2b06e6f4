"""Float matrices as the kernels read them: out_features to tiles, by several threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import int64, njit, types, void
from numba.extending import intrinsic
from numpy.typing import NDArray

from realizar.backends.cpu.codegen.emit import Emitter
from realizar.backends.cpu.kernel_cache import is_kept
from realizar.backends.cpu.kernels.float_linear import CHAINS
from realizar.backends.cpu.records import address, aligned_zeros
from realizar.backends.cpu.weights.pack import over_tiles
from realizar.quantization import MatrixSource, WeightLayout
from realizar.quantization.layout import FloatType


@dataclass(frozen=True, slots=True)
class FloatMatrix:
    """A float matrix in tiles [tiles, padded columns, lanes], or several of one shape, one after another.

    Attributes:
        kind: element type, `f32`, `f16` or `bf16`.
        columns: padded to a multiple of 4.
        tiles: of one matrix.
        weights: float32, or uint16 bits.
        count: matrices.
    """

    kind: FloatType
    out_features: int
    columns: int
    tiles: int
    weights: NDArray[np.generic]
    count: int = 1

    @property
    def size_bytes(self) -> int:
        """Bytes of the weights, padding included."""
        return int(self.weights.nbytes)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile."""
        return self.size_bytes // (self.count * self.tiles)

    def part(self, index: int) -> FloatMatrix:
        """One of several matrices; its weights are a view."""
        return replace(self, weights=self.weights.reshape(self.count, -1)[index], count=1)


def allocate_floats(layout: WeightLayout, out_features: int, cols: int, lanes: int, count: int = 1) -> FloatMatrix:
    """`count` float matrices of zeros."""
    kind, size = layout.float_type, layout.block_bytes
    assert kind is not None
    tiles, columns = _tiles(out_features, cols, lanes)
    out = aligned_zeros(count * tiles * columns * lanes, np.float32 if size == 4 else np.uint16)
    return FloatMatrix(kind, out_features, columns, tiles, out, count)


def pack_floats(
    source: MatrixSource, lanes: int, pool: Executor | None = None, packed: Callable[[int, int], None] | None = None
) -> FloatMatrix:
    """Pack a float matrix; arguments as in `fill_floats`."""
    matrix = allocate_floats(source.layout, source.out_features, source.in_features, lanes)
    fill_floats(matrix, source, lanes, pool, packed)
    return matrix


def fill_floats(
    matrix: FloatMatrix, source: MatrixSource, lanes: int, pool: Executor | None = None,
    packed: Callable[[int, int], None] | None = None,
) -> None:  # fmt: skip
    """Pack a float matrix into one of zeros, of its element type; arguments as in `pack.fill`."""
    raw, out_features, cols = source.raw, source.out_features, source.in_features
    assert raw is not None  # every float matrix has its raw bytes
    transpose, row_bytes = make_transpose(source.layout.block_bytes, lanes), raw.strides[0]
    target, columns = address(matrix.weights), matrix.columns

    def run(first: int, stop: int) -> None:
        transpose(address(raw) + first * lanes * row_bytes, row_bytes, target, out_features, cols, columns, first, stop)

    over_tiles(matrix.tiles, out_features, lanes, source.row_bytes, run, pool, packed)


def _tiles(out_features: int, cols: int, lanes: int) -> tuple[int, int]:
    """Tiles, and padded columns of each."""
    return -(-out_features // lanes), -(-cols // CHAINS) * CHAINS


def packed_float_bytes(layout: WeightLayout, out_features: int, cols: int, lanes: int) -> int:
    """Bytes of a packed float matrix."""
    tiles, columns = _tiles(out_features, cols, lanes)
    return tiles * columns * lanes * layout.block_bytes


@cache
def make_transpose(size: int, lanes: int) -> Any:
    """Moves numbers of `size` bytes. Its arguments: address of the first tile's first out_feature, bytes from one to
    the next, target, out_features, columns of the source and of the target, first tile, last tile + 1."""

    @njit(void(*[int64] * 8), nogil=True, cache=is_kept())
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


@intrinsic(prefer_literal=True)
def move(typing_context: Any, size: Any, source: Any, target: Any) -> Any:
    """Copy `size` bytes. Addresses."""
    if not isinstance(size, types.IntegerLiteral):
        return None
    kind = ir.IntType(8 * size.literal_value)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        e = Emitter(builder, 1)
        e.store(e.load(arguments[1], kind), arguments[2], 1)
        return context.get_dummy_value()

    return void(size, int64, int64), codegen
