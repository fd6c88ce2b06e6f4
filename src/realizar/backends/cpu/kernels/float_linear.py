"""Matmuls with float weights, computed in float32: float32, float16 and bfloat16 tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit, types

from realizar.backends.cpu.codegen.emit import F32, Emitter
from realizar.backends.cpu.codegen.formats import CHAINS
from realizar.backends.cpu.emitted import Float, Value, emitted
from realizar.backends.cpu.instruction_set import INSTRUCTION_SETS
from realizar.backends.cpu.kernel_cache import is_kept
from realizar.backends.cpu.kernels.linear import add_bias
from realizar.backends.cpu.memory import read_i64
from realizar.backends.cpu.records import Record

FLOAT_TYPES = ("f32", "f16", "bf16")
FLOAT_BYTES = (4, 2, 2)
TOKEN_BLOCK = 64
WIDTHS = (4, 2, 1)  # tokens at once

# weights [tiles, columns, lanes]; columns padded with zeros to a multiple of 4, as the input's rows are
FLOAT_LINEAR = Record(
    "step count_field weights tile_stride tiles columns input input_stride out out_stride residual_scale=f32 bias"
)


@emitted
def float_tile(
    builder: Any, instruction_set: int, weight_type: int, tokens: int, add: int, weights: Value, columns: Value,
    source: Value, source_stride: Value, out: Value, out_stride: Value, factor: Float,
) -> None:  # fmt: skip
    """out[t][out_features of the tile] = tile x token t, or out += factor * that where `add`."""
    lanes, name, size = INSTRUCTION_SETS[instruction_set].lanes, FLOAT_TYPES[weight_type], FLOAT_BYTES[weight_type]
    e = Emitter(builder, lanes)
    rows = [e.scaled(source, e.const(t), source_stride) for t in range(tokens)]

    def body(i: Value, sums: list[Value]) -> list[Value]:
        first = e.scaled(weights, i, CHAINS * lanes * size)
        e.prefetch_ahead(first, CHAINS * lanes * size)
        for chain in range(CHAINS):
            column = builder.add(builder.mul(i, e.const(CHAINS)), e.const(chain))
            weight = e.load_float(name, e.scaled(weights, column, lanes * size))
            for t in range(tokens):
                x = e.splat_load(e.scaled(rows[t], column, 4), F32)
                sums[t * CHAINS + chain] = e.fma(weight, x, sums[t * CHAINS + chain])
        return sums

    start = [e.const_f32(0.0)] * (tokens * CHAINS)
    sums = e.loop(builder.udiv(columns, e.const(CHAINS)), start, body)
    for t in range(tokens):
        first, second, third, fourth = sums[t * CHAINS : (t + 1) * CHAINS]
        value = builder.fadd(builder.fadd(first, second), builder.fadd(third, fourth))
        address = e.scaled(out, e.const(t), out_stride)
        if add:
            value = e.fma(e.splat(factor), value, e.load(address, e.f32, 4))
        e.store(value, address)


@njit(inline="always")
def multiply_float_tile(
    instruction_set: int, weight_type: int, add: int, first: int, second: int, third: int, weights: int, columns: int,
    source: int, source_stride: int, out: int, out_stride: int, token: int, stop: int, factor: float,
) -> None:  # fmt: skip
    """Like `multiply_tile` for a float tile: as many tokens at once as there are left of `first` to `third`."""
    while token < stop:
        x, y = source + token * source_stride, out + token * out_stride
        if stop - token >= first:
            float_tile(instruction_set, weight_type, first, add, weights, columns, x, source_stride,
                       y, out_stride, factor)  # fmt: skip
            token += first
        elif stop - token >= second:
            float_tile(instruction_set, weight_type, second, add, weights, columns, x, source_stride,
                       y, out_stride, factor)  # fmt: skip
            token += second
        else:
            float_tile(instruction_set, weight_type, third, add, weights, columns, x, source_stride,
                       y, out_stride, factor)  # fmt: skip
            token += third


def make_float_linear(instruction_set: int, weight_type: int, add: int) -> Any:
    """The kernel of one weight type; shaped like `make_linear`."""
    row_bytes = 4 * INSTRUCTION_SETS[instruction_set].lanes
    first, second, third = WIDTHS

    @cfunc(types.void(types.int64, types.int64, types.int64), cache=is_kept())
    def float_linear(address: int, thread: int, threads: int) -> None:
        arguments = FLOAT_LINEAR(address)
        tokens = read_i64(arguments.step, arguments.count_field)
        tiles, columns = arguments.tiles, arguments.columns
        in_stride, out_stride, factor = arguments.input_stride, arguments.out_stride, arguments.residual_scale
        start, stop = tiles * thread // threads, tiles * (thread + 1) // threads
        for block in range(0, tokens, TOKEN_BLOCK):
            block_end = min(block + TOKEN_BLOCK, tokens)
            for tile in range(start, stop):
                multiply_float_tile(
                    instruction_set, weight_type, add, first, second, third,
                    arguments.weights + tile * arguments.tile_stride, columns,
                    arguments.input, in_stride, arguments.out + tile * row_bytes, out_stride,
                    block, block_end, factor,
                )  # fmt: skip
        if arguments.bias != 0:
            add_bias(arguments.bias, arguments.out, out_stride, tokens,
                     start * row_bytes // 4, stop * row_bytes // 4, factor if add else np.float32(1.0))  # fmt: skip

    return float_linear
