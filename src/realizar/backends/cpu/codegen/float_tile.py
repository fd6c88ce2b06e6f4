"""The matmul of one tile of float weights with several tokens' float32 activations, emitted for any float type.

A tile is [columns, lanes], its columns padded with zeros to a multiple of `CHAINS`, as those of the activations are.
"""

from __future__ import annotations

from collections.abc import Iterator

from realizar.backends.cpu.codegen.emit import F32, Emitter
from realizar.backends.cpu.codegen.formats import CHAINS
from realizar.backends.cpu.emitted import Value
from realizar.quantization.layout import FloatType

FLOAT_BYTES: dict[FloatType, int] = {"f32": 4, "f16": 2, "bf16": 2}
FLOAT_TYPES = tuple(FLOAT_BYTES)
"""Kernels take the position here as a compile-time constant."""


def float_tile_bytes(kind: FloatType, columns: int, lanes: int) -> int:
    """Bytes of a tile of so many columns, padding included."""
    return columns * lanes * FLOAT_BYTES[kind]


def emit_float_tile(e: Emitter, kind: FloatType, weights: Value, columns: Value, rows: list[Value]) -> Iterator[Value]:
    """float32 lanes for each token: the tile times the row at its address, columns in `CHAINS` sums."""
    size = FLOAT_BYTES[kind]

    def body(i: Value, sums: list[Value]) -> list[Value]:
        first = e.scaled(weights, i, CHAINS * e.lanes * size)
        e.prefetch_ahead(first, CHAINS * e.lanes * size)
        for chain in range(CHAINS):
            column = e.b.add(e.b.mul(i, e.const(CHAINS)), e.const(chain))
            weight = e.load_float(kind, e.scaled(weights, column, e.lanes * size))
            for t, row in enumerate(rows):
                x = e.splat_load(e.scaled(row, column, 4), F32)
                sums[t * CHAINS + chain] = e.fma(weight, x, sums[t * CHAINS + chain])
        return sums

    start: list[Value] = [e.const_f32(0.0)] * (len(rows) * CHAINS)
    sums = e.loop(e.b.udiv(columns, e.const(CHAINS)), start, body)
    for t in range(len(rows)):
        first, second, third, fourth = sums[t * CHAINS : (t + 1) * CHAINS]
        yield e.b.fadd(e.b.fadd(first, second), e.b.fadd(third, fourth))
