"""Bound operations: kernels with their arguments, and the table of them that threads walk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.records import address, aligned_zeros
from realizar.backends.cpu.walker import OPERATION_FIELDS
from realizar.models.mixers import SharedAttention
from realizar.models.spec import Attention


@dataclass(frozen=True, slots=True)
class BoundOperation:
    """A kernel and its arguments.

    Attributes:
        part: what a profile calls it.
        kernel: its address. arguments: int64, the record that it reads.
        barrier: whether threads wait for each other after it.
        weight_bytes: of the matrix that it reads; of one of them, where `is_of_experts`.
        attention: of the layer whose cache it reads; None for what reads none.
        begins_block: whether it is the first of a block, and reads the residual stream.
    """

    part: str
    kernel: int
    arguments: NDArray[np.int64]
    barrier: bool = True
    weight_bytes: int = 0
    attention: Attention | SharedAttention | None = None
    begins_block: bool = False
    is_of_experts: bool = False


@dataclass(frozen=True, slots=True)
class BoundProgram:
    """Operations, and as threads walk them: int64 [count, 3] (kernel, address of arguments, barrier)."""

    table: NDArray[np.int64]
    operations: tuple[BoundOperation, ...]

    @property
    def at(self) -> int:
        return address(self.table)

    @property
    def count(self) -> int:
        return len(self.table)


def walkable(operations: Iterable[BoundOperation]) -> BoundProgram:
    """A program of these operations, at whose end all threads are done."""
    bound = tuple(operations)
    table = aligned_zeros((len(bound), OPERATION_FIELDS), np.int64)
    for row, operation in zip(table, bound, strict=True):
        row[:] = operation.kernel, address(operation.arguments), operation.barrier
    table[-1, 2] = 1
    return BoundProgram(table, bound)
