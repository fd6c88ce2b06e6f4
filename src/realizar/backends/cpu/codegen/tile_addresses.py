"""Addresses of the operands of one tile matmul."""

from __future__ import annotations

from dataclasses import dataclass

from realizar.backends.cpu.codegen.emit import Value


@dataclass(frozen=True, slots=True)
class TileAddresses:
    """Addresses of a tile and its tokens: codes, scales, supers, codebook table and first activation record,
    the number of groups of 32 columns, and the bytes from one group's records to the next's."""

    codes: Value
    scales: Value
    supers: Value
    table: Value
    activations: Value
    groups: Value
    group_stride: int
