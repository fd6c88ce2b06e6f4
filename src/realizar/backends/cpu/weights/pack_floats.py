"""Float matrices as the kernels read them: rows to tiles, by several threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
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
from realizar.checkpoint.ggml_types import GGMLType


@dataclass(frozen=True, slots=True)
class FloatMatrix:
    """A float matrix in tiles [tiles, padded columns, lanes].

    Attributes:
        kind: `f32`, `f16` or `bf16`.
        columns: padded to a multiple of 4.
        weights: float32, or uint16 bits.
    """

    kind: str
    rows: int
    columns: int
    tiles: int
    weights: NDArray[np.generic]

    @property
    def size_bytes(self) -> int:
        """Bytes of the weights, padding included."""
        return int(self.weights.nbytes)


def pack_floats(
    ggml_type: GGMLType, data: NDArray[np.uint8], rows: int, cols: int, lanes: int,
    pool: Executor | None = None, packed: Callable[[int, int], None] | None = None,
) -> FloatMatrix:  # fmt: skip
    """Pack a matrix of F32, F16 or BF16; arguments as in `pack`."""
    data, size = np.ascontiguousarray(data), ggml_type.type_size
    tiles, columns = _tiles(rows, cols, lanes)
    out = aligned_zeros(tiles * columns * lanes, np.float32 if size == 4 else np.uint16)
    transpose, source, target = make_transpose(size, lanes), address(data), address(out)

    def piece(start: int, first: int, stop: int) -> None:
        transpose(source + start, target, rows, cols, columns, first, stop)

    over_tiles(tiles, rows, lanes, cols * size, piece, pool, packed)
    return FloatMatrix(ggml_type.name.lower(), rows, columns, tiles, out)


def _tiles(rows: int, cols: int, lanes: int) -> tuple[int, int]:
    """Tiles, and padded columns of each."""
    return -(-rows // lanes), -(-cols // CHAINS) * CHAINS


def packed_float_bytes(ggml_type: GGMLType, rows: int, cols: int, lanes: int) -> int:
    """Bytes of a packed float matrix."""
    tiles, columns = _tiles(rows, cols, lanes)
    return tiles * columns * lanes * ggml_type.type_size


@cache
def make_transpose(size: int, lanes: int) -> Any:
    """Moves numbers of `size` bytes: address of the first tile's first row, target, rows, columns of the source and of
    the target, first tile, last tile + 1."""

    @njit(void(*[int64] * 7), nogil=True, cache=is_kept())
    def transpose(source: int, target: int, rows: int, cols: int, columns: int, first: int, stop: int) -> None:
        for tile in range(first, stop):
            for lane in range(min(lanes, rows - tile * lanes)):
                at = source + ((tile - first) * lanes + lane) * cols * size
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
