"""Inner loops of a gated delta net: convolution, norms of heads, and passes over a state. Sums have one fixed order.

A state lies in runs of `run_columns` value columns, [value columns / run, key_size, run], so that a run stays in the
first-level cache from token to token. Lanes are value columns: a pass sums over the key's dimensions one after another,
each column by itself, whatever else is computed beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from realizar.backends.cpu.codegen.emit import F32, I64
from realizar.backends.cpu.codegen.vector_math import VectorMath
from realizar.backends.cpu.emitted import Float, Value, emitted

MOST_VECTORS = 4  # of a run: two sums for each hide the latency of fma, and 64 columns of 128 floats fit a 48 KiB cache


def run_columns(value_size: int, lanes: int) -> int:
    """Columns of a run, whole vectors; 0 where a head of `value_size` can't be cut into any."""
    for vectors in (MOST_VECTORS, 2, 1):
        if value_size % (vectors * lanes) == 0:
            return vectors * lanes
    return 0


def head_lanes(sizes: Sequence[int], most: int) -> int:
    """Lanes of a vector, at most so many, of which heads of these sizes have whole ones; 0 where there are none."""
    return next((lanes for lanes in (16, 8, 4) if lanes <= most and not any(size % lanes for size in sizes)), 0)


@emitted
def convolve(
    builder: Any, lanes: int, sources: Value, length: Value, column: Value, count: Value, kernel: Value,
    kernel_stride: Value, out: Value,
) -> None:  # fmt: skip
    """out = silu(sum over j < length of kernel[j] * source j), for `count` whole vectors of channels from `column` on.

    `sources` is the address of `length` int64, the addresses of the tokens' rows; kernel float32 [length, channels].
    """
    e = VectorMath(builder, lanes)
    first = builder.mul(column, e.const(4))

    def vector(i: Value, carried: list[Value]) -> list[Value]:
        offset = builder.add(first, builder.mul(i, e.const(4 * lanes)))

        def tap(j: Value, sums: list[Value]) -> list[Value]:
            row = e.load(e.scaled(sources, j, 8), I64, 8)
            weights = e.load(builder.add(e.scaled(kernel, j, kernel_stride), offset), e.f32, 4)
            return [e.fma(weights, e.load(builder.add(row, offset), e.f32, 4), sums[0])]

        (total,) = e.loop(length, [e.const_f32(0.0)], tap)
        e.store(e.silu(total), e.scaled(out, i, 4 * lanes))
        return carried

    e.loop(count, [], vector)


@emitted
def dot(builder: Any, lanes: int, first: Value, second: Value, count: Value) -> Float:
    """The sum of the products of `count` whole vectors of float32 at two addresses."""
    e = VectorMath(builder, lanes)

    def vector(i: Value, sums: list[Value]) -> list[Value]:
        a, b = (e.load(e.scaled(at, i, 4 * lanes), e.f32, 4) for at in (first, second))
        return [e.fma(a, b, sums[0])]

    (total,) = e.loop(count, [e.const_f32(0.0)], vector)
    return e.reduce_add(total)


@emitted
def scale(builder: Any, lanes: int, values: Value, count: Value, factor: Float) -> None:
    """Multiply `count` whole vectors of float32 in place."""
    e = VectorMath(builder, lanes)
    spread = e.splat(factor)

    def vector(i: Value, carried: list[Value]) -> list[Value]:
        at = e.scaled(values, i, 4 * lanes)
        e.store(builder.fmul(e.load(at, e.f32, 4), spread), at)
        return carried

    e.loop(count, [], vector)


@emitted
def gate_head(builder: Any, lanes: int, values: Value, count: Value, factor: Float, weight: Value, gate: Value) -> None:
    """values = values * factor * weight * silu(gate), for `count` whole vectors of float32."""
    e = VectorMath(builder, lanes)
    spread = e.splat(factor)

    def vector(i: Value, carried: list[Value]) -> list[Value]:
        at, scales, gates = (e.scaled(start, i, 4 * lanes) for start in (values, weight, gate))
        normed = builder.fmul(builder.fmul(e.load(at, e.f32, 4), spread), e.load(scales, e.f32, 4))
        e.store(builder.fmul(normed, e.silu(e.load(gates, e.f32, 4))), at)
        return carried

    e.loop(count, [], vector)


@emitted
def pass_over(
    builder: Any, lanes: int, columns: int, updates: int, reads: int, source: Value, target: Value,
    rows: Value, earlier_key: Value, earlier_decay: Float, lacking: Value, key: Value, query: Value, value: Value,
    decay: Float, beta: Float, query_key: Float, out: Value,
) -> None:  # fmt: skip
    """One pass over a run of `columns` value columns of a state of `rows` key dimensions, float32 [rows, columns].

    With `updates`, target = earlier_decay * source + outer(earlier_key, lacking), by the token before. With `reads`,
    for the next token, S being the state so far (`source` where there is no update):

        lacking = beta * (value - decay * (key @ S)),  out = decay * (query @ S) + query_key * lacking

    which is what the query reads from the state that this token's own update makes, `query_key` being query @ key.
    """
    width, size = columns // lanes, 4 * lanes
    e = VectorMath(builder, lanes)
    lacked = [e.load(e.at(lacking, v * size), e.f32, 4) for v in range(width)] if updates else []
    faded = e.splat(earlier_decay)

    def row(i: Value, sums: list[Value]) -> list[Value]:
        at, to = e.scaled(source, i, width * size), e.scaled(target, i, width * size)
        state = [e.load(e.at(at, v * size), e.f32, 4) for v in range(width)]
        if updates:
            learned = e.splat_load(e.scaled(earlier_key, i, 4), F32)
            state = [e.fma(learned, lacked[v], builder.fmul(faded, state[v])) for v in range(width)]
            for v in range(width):
                e.store(state[v], e.at(to, v * size))
        if not reads:
            return sums
        k, q = (e.splat_load(e.scaled(vector, i, 4), F32) for vector in (key, query))
        of_key = [e.fma(k, state[v], sums[v]) for v in range(width)]
        return of_key + [e.fma(q, state[v], sums[width + v]) for v in range(width)]

    sums = e.loop(rows, [e.const_f32(0.0)] * (2 * width * reads), row)
    if reads:
        decays, betas, shared = e.splat(decay), e.splat(beta), e.splat(query_key)
        for v in range(width):
            kept = builder.fmul(decays, sums[v])
            lack = builder.fmul(betas, builder.fsub(e.load(e.at(value, v * size), e.f32, 4), kept))
            e.store(lack, e.at(lacking, v * size))
            e.store(e.fma(shared, lack, builder.fmul(decays, sums[width + v])), e.at(out, v * size))
