"""Bound operations: kernels with their arguments, and the table of them that threads walk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.kernel import Kernel
from realizar.backends.cpu.records import address, aligned_zeros
from realizar.backends.cpu.walker import OPERATION_FIELDS
from realizar.models.mixers import SharedAttention
from realizar.models.spec import Attention


@dataclass(frozen=True, slots=True)
class BoundOperation:
    """A kernel and its arguments.

    Attributes:
        part: what a profile calls it.
        arguments: int64, the record that it reads.
        barrier: whether threads wait for each other after it.
        weight_bytes: of the matrix that it reads; of one of them, where `is_of_experts`.
        attention: of the layer whose cache it reads; None for what reads none.
        begins_block: whether it is the first of a block, and reads the residual stream.
    """

    part: str
    kernel: Kernel
    arguments: NDArray[np.int64]
    barrier: bool = True
    weight_bytes: int = 0
    attention: Attention | SharedAttention | None = None
    begins_block: bool = False
    is_of_experts: bool = False


class BoundProgram:
    """Operations, at whose end all threads are done."""

    def __init__(self, operations: Iterable[BoundOperation]) -> None:
        self.operations = tuple(operations)

    @cached_property
    def table(self) -> NDArray[np.int64]:
        """As threads walk them: int64 [count, 3] (kernel, address of arguments, barrier)."""
        table = aligned_zeros((self.count, OPERATION_FIELDS), np.int64)
        for row, operation in zip(table, self.operations, strict=True):
            row[:] = operation.kernel.address, address(operation.arguments), operation.barrier
        table[-1, 2] = 1
        return table

    @property
    def at(self) -> int:
        return address(self.table)

    @property
    def count(self) -> int:
        return len(self.operations)


def kernels_of(programs: Iterable[BoundProgram]) -> list[Kernel]:
    return [operation.kernel for program in programs for operation in program.operations]


def make_tables(programs: Iterable[BoundProgram]) -> None:
    """Make their kernels, so that no walk has to wait for any."""
    for program in programs:
        _ = program.table
