"""The matmul of one tile of float weights with several tokens' float32 activations, emitted for any float type.

A tile is [columns, lanes], its columns padded with zeros to a multiple of `CHAINS`, as those of the activations are. Of
e4m3 a tile's groups lie one after another, so that memory is read as one stream: float32 [lanes], their scales times
2^32, and [columns of a group / 4, lanes, 4], four bytes of a lane together. A byte's exponent and mantissa become those
of a float32 that is 2^-120 times its number, and activations are multiplied by 2^88, so that products are within
float32 for those from 2^-61 to 2^40.

Numbers below 2^-6 have an exponent of 0 in e4m3 and then in float32 too. Processors of Intel multiply these a hundred
times slower than others, so runs of columns that have any come as halves. Their flags are the signs of the group's
scales, which are above 0: lane i's is that of run i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from llvmlite import ir

from realizar.backends.cpu.codegen.emit import F16, F32, I16, I64, Emitter
from realizar.backends.cpu.codegen.formats import CHAINS
from realizar.backends.cpu.emitted import Value
from realizar.quantization.layout import FloatType, WeightLayout

FloatKind = FloatType | Literal["e4m3_32", "e4m3_64", "e4m3_128"]
"""A type of numbers; of e4m3 with the columns of a group."""
FLOAT_BYTES: dict[FloatKind, int] = {"f32": 4, "f16": 2, "bf16": 2, "e4m3_32": 1, "e4m3_64": 1, "e4m3_128": 1}
FLOAT_TYPES = tuple(FLOAT_BYTES)
"""Kernels take the position here as a compile-time constant."""
_GROUPS: dict[FloatKind, int] = {"e4m3_32": 32, "e4m3_64": 64, "e4m3_128": 128}
E4M3_POWER = 32
"""Scales of e4m3 are multiplied by 2 to this."""
_BYTE_POWER, _HALF_POWER = 120, 8
_Add = Callable[[Value, list[Value], list[Value]], list[Value]]
"""Address of the columns of a tile, addresses of each token's activations of them, and sums so far, to those after."""


def float_kind(layout: WeightLayout) -> FloatKind | None:
    """The kind of matrices of a layout; None where kernels multiply codes."""
    if layout.has_integers:
        return None
    return layout.float_type or next(kind for kind, group in _GROUPS.items() if group == layout.group_size)


def float_tile_bytes(kind: FloatKind, columns: int, lanes: int) -> int:
    """Bytes of a tile of so many columns, padding included."""
    scales = 4 * columns // _GROUPS[kind] if kind in _GROUPS else 0
    return (columns * FLOAT_BYTES[kind] + scales) * lanes


def runs_of_group(kind: FloatKind, lanes: int) -> int:
    """Of as many columns each, as many as there are lanes or four columns."""
    return min(lanes, _GROUPS[kind] // CHAINS)


def emit_float_tile(e: Emitter, kind: FloatKind, weights: Value, columns: Value, rows: list[Value]) -> Iterator[Value]:
    """float32 lanes for each token: the tile times the row at its address, columns in `CHAINS` sums."""
    if kind in _GROUPS:
        sums = _emit_groups(e, kind, weights, columns, rows)
    else:
        size = e.lanes * FLOAT_BYTES[kind]

        def add(at: Value, columns: list[Value], sums: list[Value]) -> list[Value]:
            numbers = [e.load_float(kind, e.at(at, chain * size)) for chain in range(CHAINS)]
            return _multiplied(e, numbers, columns, sums)

        sums = _summed(e, CHAINS * size, add, weights, columns, rows, [e.const_f32(0.0)] * CHAINS * len(rows))
    for t in range(len(rows)):
        first, second, third, fourth = sums[t * CHAINS : (t + 1) * CHAINS]
        yield e.b.fadd(e.b.fadd(first, second), e.b.fadd(third, fourth))


def _summed(
    e: Emitter, size: int, add: _Add, weights: Value, columns: Value, rows: list[Value], sums: list[Value]
) -> list[Value]:
    """`CHAINS` sums for each token, after those given. `size`: bytes of `CHAINS` columns, which `add` reads."""

    def body(i: Value, sums: list[Value]) -> list[Value]:
        at = e.scaled(weights, i, size)
        e.prefetch_ahead(at, size)
        return add(at, [e.scaled(row, i, 4 * CHAINS) for row in rows], sums)

    return e.loop(e.b.udiv(columns, e.const(CHAINS)), sums, body)


def _multiplied(e: Emitter, numbers: list[Value], columns: list[Value], sums: list[Value]) -> list[Value]:
    """The sums with those of `CHAINS` columns of numbers times each token's activations there."""
    result = []
    for place, total in enumerate(sums):
        token, chain = divmod(place, CHAINS)
        x = e.splat_load(e.at(columns[token], 4 * chain), F32)
        result.append(e.fma(numbers[chain], x, total))
    return result


def _emit_groups(e: Emitter, kind: FloatKind, weights: Value, columns: Value, rows: list[Value]) -> list[Value]:
    """The sums of e4m3: those of a group times its scales, added up over the groups."""
    group, runs = _GROUPS[kind], runs_of_group(kind, e.lanes)
    with e.b.goto_entry_block():
        scratch = e.b.alloca(F32, group * len(rows))
        scratch.align = 4 * e.lanes
        room = e.b.ptrtoint(scratch, I64)
    scaled = [e.at(room, 4 * group * t) for t in range(len(rows))]
    factor = e.const_f32(2.0 ** (_BYTE_POWER - E4M3_POWER))

    def body(i: Value, totals: list[Value]) -> list[Value]:
        firsts = [e.scaled(row, i, 4 * group) for row in rows]
        for first, target in zip(firsts, scaled, strict=True):
            for column in range(0, group, e.lanes):
                x = e.load(e.at(first, 4 * column), e.f32, 4)
                e.store(e.b.fmul(x, factor), e.at(target, 4 * column))
        at = e.scaled(weights, i, float_tile_bytes(kind, group, e.lanes))
        e.prefetch_ahead(at, 4 * e.lanes)
        signed = e.load(at, e.i32, 4)
        flags = e.b.zext(e.b.bitcast(e.b.icmp_signed("<", signed, e.const_i32(0)), ir.IntType(e.lanes)), I64)
        numbers = e.at(at, 4 * e.lanes)

        def run(j: Value, sums: list[Value]) -> list[Value]:
            first, columns = e.scaled(numbers, j, group // runs * e.lanes), e.const(group // runs)

            def summed(read: Callable[[Emitter, Value], list[Value]], rows: list[Value]) -> list[Value]:
                def add(at: Value, columns: list[Value], sums: list[Value]) -> list[Value]:
                    return _multiplied(e, read(e, at), columns, sums)

                own = [e.scaled(row, j, 4 * group // runs) for row in rows]
                return _summed(e, CHAINS * e.lanes, add, first, columns, own, sums)

            has_small = e.b.trunc(e.b.lshr(flags, j), ir.IntType(1))
            return _either(e, has_small, lambda: summed(_halves, firsts), lambda: summed(_bytes, scaled))

        own = e.loop(e.const(runs), [e.const_f32(0.0)] * CHAINS * len(rows), run)
        scale = e.b.bitcast(e.b.and_(signed, e.const_i32(0x7FFFFFFF)), e.f32)
        return [e.fma(each, scale, total) for each, total in zip(own, totals, strict=True)]

    return e.loop(e.b.udiv(columns, e.const(group)), [e.const_f32(0.0)] * CHAINS * len(rows), body)


def _either(e: Emitter, rare: Value, one: Callable[[], list[Value]], other: Callable[[], list[Value]]) -> list[Value]:
    """float32 lanes: those of `one` where a bit is set, or else of `other`."""
    with e.b.if_else(rare, likely=False) as (is_set, is_not):
        with is_set:
            ones, after_one = one(), e.b.block
        with is_not:
            others, after_other = other(), e.b.block
    chosen = [e.b.phi(e.f32) for _ in ones]
    for phi, value, instead in zip(chosen, ones, others, strict=True):
        phi.add_incoming(value, after_one)
        phi.add_incoming(instead, after_other)
    return chosen


def _bytes(e: Emitter, at: Value) -> list[Value]:
    """Four bytes of e4m3 in each lane as float32 lanes of four columns, each 2^-120 times its number.

    Two bytes at a time: their signs stand where those of float32 do in its upper half, and their other bits behind the
    exponent's upper four.
    """
    odd, even = (e.b.bitcast(pair, e.i32) for pair in _moved(e, at, 4, ~0x780F))
    lower = [e.b.shl(pair, e.const_i32(16)) for pair in (even, odd)]
    upper = [e.b.and_(pair, e.const_i32(0xFFFF0000)) for pair in (even, odd)]
    return [e.b.bitcast(each, e.f32) for each in (*lower, *upper)]


def _halves(e: Emitter, at: Value) -> list[Value]:
    """As `_bytes`, by way of halves that are 2^-8 times their numbers, each 2^-32 times its number."""
    odd, even = (e.b.bitcast(pair, e.i32) for pair in _moved(e, at, 1, ~0x407F))
    parts = even, odd, e.shifted(even, 16), e.shifted(odd, 16)
    halves = (e.b.bitcast(e.b.trunc(part, ir.VectorType(I16, e.lanes)), ir.VectorType(F16, e.lanes)) for part in parts)
    factor = e.const_f32(2.0 ** (_HALF_POWER - E4M3_POWER))
    return [e.b.fmul(e.b.fpext(each, e.f32), factor) for each in halves]


def _moved(e: Emitter, at: Value, places: int, mask: int) -> list[Value]:
    """The odd bytes as the upper ones of words, the sign at their top and the rest `places` lower; the even ones so."""
    words = ir.VectorType(I16, 2 * e.lanes)

    def each(value: int) -> Value:
        return ir.Constant(words, [value] * words.count)

    both = e.load(at, words, 1)
    return [e.b.and_(e.b.ashr(word, each(places)), each(mask)) for word in (both, e.b.shl(both, each(8)))]
