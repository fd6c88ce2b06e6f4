"""A matrix packed for the CPU's kernels, as a load reserves its memory and fills it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor

from realizar.backends.cpu.weights.pack import Matrix, allocate, fill
from realizar.quantization.source import MatrixSource


def pack(
    source: MatrixSource, lanes: int, pool: Executor | None = None, packed: Callable[[int, int], None] | None = None
) -> Matrix:
    """Arguments and errors are those of `fill` and `allocate`."""
    matrix = allocate(source.layout, source.out_features, source.in_features, lanes)
    fill(matrix, source, lanes, pool, packed)
    return matrix
