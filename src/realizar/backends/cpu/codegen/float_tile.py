"""The matmul of one tile of float weights with several tokens' float32 activations, emitted for any float type.

A tile is [columns, lanes], its columns padded with zeros to a multiple of `CHAINS`, as those of the activations are. Of
e4m3 it is [groups, columns of a group, lanes], and float32 [groups, lanes] behind that: scales times 2^8, as a byte
becomes a half that is 2^-8 times its number.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from realizar.backends.cpu.codegen.emit import F32, Emitter
from realizar.backends.cpu.codegen.formats import CHAINS
from realizar.backends.cpu.emitted import Value
from realizar.quantization.layout import FloatType, WeightLayout

FloatKind = FloatType | Literal["e4m3_32", "e4m3_64", "e4m3_128"]
"""A type of numbers; of e4m3 with the columns of a group."""
FLOAT_BYTES: dict[FloatKind, int] = {"f32": 4, "f16": 2, "bf16": 2, "e4m3_32": 1, "e4m3_64": 1, "e4m3_128": 1}
FLOAT_TYPES = tuple(FLOAT_BYTES)
"""Kernels take the position here as a compile-time constant."""
_GROUPS: dict[FloatKind, int] = {"e4m3_32": 32, "e4m3_64": 64, "e4m3_128": 128}
E4M3_POWER = 8


def float_kind(layout: WeightLayout) -> FloatKind | None:
    """The kind of matrices of a layout; None where kernels multiply codes."""
    if layout.has_integers:
        return None
    return layout.float_type or next(kind for kind, group in _GROUPS.items() if group == layout.group_size)


def float_tile_bytes(kind: FloatKind, columns: int, lanes: int) -> int:
    """Bytes of a tile of so many columns, padding included."""
    scales = 4 * columns // _GROUPS[kind] if kind in _GROUPS else 0
    return (columns * FLOAT_BYTES[kind] + scales) * lanes


def emit_float_tile(e: Emitter, kind: FloatKind, weights: Value, columns: Value, rows: list[Value]) -> Iterator[Value]:
    """float32 lanes for each token: the tile times the row at its address, columns in `CHAINS` sums."""
    count, size = len(rows) * CHAINS, FLOAT_BYTES[kind]

    def summed(first: Value, columns: Value, rows: list[Value]) -> list[Value]:
        def body(i: Value, sums: list[Value]) -> list[Value]:
            at = e.scaled(first, i, CHAINS * e.lanes * size)
            e.prefetch_ahead(at, CHAINS * e.lanes * size)
            for chain in range(CHAINS):
                column = e.b.add(e.b.mul(i, e.const(CHAINS)), e.const(chain))
                weight = e.load_float("e4m3" if kind in _GROUPS else kind, e.scaled(first, column, e.lanes * size))
                for t, row in enumerate(rows):
                    x = e.splat_load(e.scaled(row, column, 4), F32)
                    sums[t * CHAINS + chain] = e.fma(weight, x, sums[t * CHAINS + chain])
            return sums

        return e.loop(e.b.udiv(columns, e.const(CHAINS)), [e.const_f32(0.0)] * count, body)

    if kind in _GROUPS:
        group = e.const(_GROUPS[kind])
        scales = e.scaled(weights, columns, e.lanes)

        def group_body(i: Value, totals: list[Value]) -> list[Value]:
            first = e.b.mul(i, group)
            own = summed(e.scaled(weights, first, e.lanes), group, [e.scaled(row, first, 4) for row in rows])
            scale = e.load(e.scaled(scales, i, 4 * e.lanes), e.f32, 4)
            return [e.fma(each, scale, total) for each, total in zip(own, totals, strict=True)]

        sums = e.loop(e.b.udiv(columns, group), [e.const_f32(0.0)] * count, group_body)
    else:
        sums = summed(weights, columns, rows)
    for t in range(len(rows)):
        first, second, third, fourth = sums[t * CHAINS : (t + 1) * CHAINS]
        yield e.b.fadd(e.b.fadd(first, second), e.b.fadd(third, fourth))
