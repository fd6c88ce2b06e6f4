"""Inner loops of attention: scores of several queries with a run of keys, a softmax row, and weighted sums of values.

Keys lie transposed, so lanes are keys in the scores and dimensions in the sums: no sum across lanes anywhere but once
per softmax row. Every query's arithmetic is the same whatever other queries share the tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from realizar.backends.cpu.codegen.emit import F32, I8, I32, Emitter
from realizar.backends.cpu.codegen.vector_math import VectorMath
from realizar.backends.cpu.emitted import Float, Value, emitted
from realizar.backends.cpu.instruction_set import INSTRUCTION_SETS
from realizar.backends.cpu.kv.layout import ELEMENT_BYTES, GROUP, KV_DTYPES

NEVER = -1e30  # a score that takes no part


def vectors_of(lanes: int) -> int:
    """Vectors of keys, or of dimensions, per pass: 16 or 32 lanes in all."""
    return 2 if lanes > 4 else 4


def _load_kv(e: Emitter, dtype: str, address: Value) -> Value:
    if dtype == "int8":
        return e.b.sitofp(e.load(address, ir.VectorType(I8, e.lanes), 1), e.f32)
    return e.load_float("e4m3" if dtype == "fp8" else dtype, address, nans=True)


def padded_queries(count: int) -> int:
    """Queries that a tile of `count` (1 to 8) is computed as; those beyond `count` are zero. Compiled into kernels."""
    if count > 4:
        return 8
    return 4 if count > 1 else 1


def _for_each_count(e: Emitter, queries: int | Value, emit: Callable[[range], None]) -> None:
    """Emit a body for every value of `padded_queries` and the choice among them, or for a constant number alone.

    It gets the queries of one pass: as many as registers hold the sums of.
    """
    at_once = 8 if e.lanes > 8 else 4
    known = e.const(queries) if isinstance(queries, int) else queries
    for count in (queries,) if isinstance(queries, int) else (8, 4, 1):
        with e.b.if_then(e.b.icmp_signed("==", known, e.const(count))):
            for first in range(0, count, at_once):
                emit(range(first, min(first + at_once, count)))


def _cache_emitter(builder: Any, instruction_set: int, dtype: int) -> tuple[Emitter, str, int]:
    """An emitter, the name of a KV element type, and `vectors_of(lanes)`."""
    lanes = INSTRUCTION_SETS[instruction_set].lanes
    return Emitter(builder, lanes), KV_DTYPES[dtype], vectors_of(lanes)


@emitted
def score_keys(
    builder: Any, instruction_set: int, dtype: int, queries: int | Value, query: Value, query_stride: Value,
    groups: Value, keys: Value, key_stride: Value, scales: Value, scale_stride: Value, out: Value, out_stride: Value,
) -> None:  # fmt: skip
    """out[q][key] = query[q] . key for `queries` (8, 4 or 1) queries and `vectors_of(lanes)` vectors of keys.

    `groups` of 32 dimensions; `keys` at the first key's dimension 0, `key_stride` bytes to the next dimension; int8
    `scales` at the first key's group 0, `scale_stride` bytes to the next group.
    """
    e, name, width = _cache_emitter(builder, instruction_set, dtype)

    def emit(rows: range) -> None:
        zeros = [e.const_f32(0.0)] * (len(rows) * width)
        starts = [e.scaled(query, e.const(r), query_stride) for r in rows]

        def dimension(d: Value, sums: list[Value]) -> list[Value]:
            at = e.scaled(keys, d, key_stride)
            loaded = [_load_kv(e, name, e.at(at, v * e.lanes * ELEMENT_BYTES[name])) for v in range(width)]
            for r, row in enumerate(starts):
                x = e.splat_load(e.scaled(row, d, 4), F32)
                for v in range(width):
                    sums[r * width + v] = e.fma(loaded[v], x, sums[r * width + v])
            return sums

        def group(g: Value, sums: list[Value]) -> list[Value]:
            first = builder.mul(g, e.const(GROUP))
            partial = e.loop(e.const(GROUP), zeros, lambda d, inner: dimension(builder.add(first, d), inner))
            at = e.scaled(scales, g, scale_stride)
            for v in range(width):
                scale = e.load(e.at(at, v * e.lanes * 4), e.f32, 4)
                for r in range(len(rows)):
                    sums[r * width + v] = e.fma(partial[r * width + v], scale, sums[r * width + v])
            return sums

        if name == "int8":
            sums = e.loop(groups, zeros, group)
        else:
            sums = e.loop(builder.mul(groups, e.const(GROUP)), zeros, dimension)
        for r, row in enumerate(rows):
            for v in range(width):
                e.store(sums[r * width + v], e.at(e.scaled(out, e.const(row), out_stride), v * e.lanes * 4))

    _for_each_count(e, queries, emit)


@emitted
def add_values(
    builder: Any, instruction_set: int, dtype: int, queries: int | Value, weights: Value, weight_stride: Value,
    count: Value, values: Value, value_stride: Value, scales: Value, scale_stride: Value, out: Value, out_stride: Value,
) -> None:  # fmt: skip
    """out[q][dims] += sum over `count` tokens of weights[q][token] * values[token][dims].

    `vectors_of(lanes)` vectors of dimensions from `values`; all of them lie in one group of 32, whose int8 scale for
    the first token is at `scales`.
    """
    e, name, width = _cache_emitter(builder, instruction_set, dtype)

    def emit(rows: range) -> None:
        targets = [e.at(e.scaled(out, e.const(r), out_stride), v * e.lanes * 4) for r in rows for v in range(width)]
        starts = [e.scaled(weights, e.const(r), weight_stride) for r in rows]

        def token(t: Value, sums: list[Value]) -> list[Value]:
            at = e.scaled(values, t, value_stride)
            loaded = [_load_kv(e, name, e.at(at, v * e.lanes * ELEMENT_BYTES[name])) for v in range(width)]
            if name == "int8":
                scale = e.splat_load(e.scaled(scales, t, scale_stride), F32)
                loaded = [builder.fmul(value, scale) for value in loaded]
            for r, row in enumerate(starts):
                weight = e.splat_load(e.scaled(row, t, 4), F32)
                for v in range(width):
                    sums[r * width + v] = e.fma(loaded[v], weight, sums[r * width + v])
            return sums

        sums = e.loop(count, [e.load(target, e.f32, 4) for target in targets], token)
        for value, target in zip(sums, targets, strict=True):
            e.store(value, target)

    _for_each_count(e, queries, emit)


@emitted
def widen_run(
    builder: Any, instruction_set: int, dtype: int, source: Value, source_stride: Value, count: Value, target: Value
) -> None:
    """`count` times `vectors_of(lanes)` vectors of cache elements, `source_stride` bytes apart, one after another."""
    e, name, width = _cache_emitter(builder, instruction_set, dtype)

    def run(i: Value, carried: list[Value]) -> list[Value]:
        at, to = e.scaled(source, i, source_stride), e.scaled(target, i, width * e.lanes * 4)
        for v in range(width):
            e.store(_load_kv(e, name, e.at(at, v * e.lanes * ELEMENT_BYTES[name])), e.at(to, v * e.lanes * 4))
        return carried

    e.loop(count, [], run)


@emitted
def softmax_row(
    builder: Any, instruction_set: int, capped: int, scores: Value, first: Value, last: Value, cap: Float, state: Value
) -> None:
    """Scores of keys first .. last - 1 (of a row starting at address `scores`) become exp(score - max).

    Keys outside that share a vector with those become 0. `state` receives the maximum and the sum of the weights,
    float32 each. At least one key must be inside.
    """
    lanes = INSTRUCTION_SETS[instruction_set].lanes
    e = VectorMath(builder, lanes)
    begin = builder.udiv(first, e.const(lanes))
    end = builder.udiv(builder.add(last, e.const(lanes - 1)), e.const(lanes))
    count = builder.sub(end, begin)
    start = e.scaled(scores, begin, 4 * lanes)
    ramp = ir.Constant(e.i32, list(range(lanes)))
    limit = e.splat(cap)

    def soften(i: Value, carried: list[Value]) -> list[Value]:
        at = e.scaled(start, i, 4 * lanes)
        value = builder.fdiv(e.load(at, e.f32, 4), limit)
        e.store(builder.fmul(limit, e.tanh(value)), at)
        return carried

    def hide(vector: Value) -> None:
        at = e.scaled(scores, vector, 4 * lanes)
        index = builder.add(e.splat(builder.trunc(builder.mul(vector, e.const(lanes)), I32)), ramp)
        low = builder.icmp_signed(">=", index, e.splat(builder.trunc(first, I32)))
        inside = builder.and_(low, builder.icmp_signed("<", index, e.splat(builder.trunc(last, I32))))
        e.store(builder.select(inside, e.load(at, e.f32, 4), e.const_f32(NEVER)), at)

    def largest(i: Value, carried: list[Value]) -> list[Value]:
        return [e.maximum(e.load(e.scaled(start, i, 4 * lanes), e.f32, 4), carried[0])]

    if capped:
        e.loop(count, [], soften)
    hide(begin)
    hide(builder.sub(end, e.const(1)))
    (peaks,) = e.loop(count, [e.const_f32(NEVER)], largest)
    peak = e.reduce_max(peaks)
    spread = e.splat(peak)

    def weigh(i: Value, carried: list[Value]) -> list[Value]:
        at = e.scaled(start, i, 4 * lanes)
        weight = e.exp_or_zero(builder.fsub(e.load(at, e.f32, 4), spread))
        e.store(weight, at)
        return [builder.fadd(carried[0], weight)]

    (sums,) = e.loop(count, [e.const_f32(0.0)], weigh)
    e.store(peak, state)
    e.store(e.reduce_add(sums), e.at(state, 4))
