"""Matmuls with float weights, computed in float32: float32, float16 and bfloat16 tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from realizar.backends.cpu.codegen.emit import Emitter
from realizar.backends.cpu.codegen.float_tile import FLOAT_TYPES, emit_float_tile
from realizar.backends.cpu.emitted import Float, Value, emitted
from realizar.backends.cpu.instruction_set import INSTRUCTION_SETS
from realizar.backends.cpu.kernel import Kernel, kernel
from realizar.backends.cpu.kernels.linear import add_bias, store_sums
from realizar.backends.cpu.memory import read_i64
from realizar.backends.cpu.records import Record

TOKEN_BLOCK = 64
WIDTHS = (4, 2, 1)  # tokens at once

FLOAT_LINEAR = Record(
    "step count_field weights tile_stride tiles columns input input_stride out out_stride residual_scale=f32 bias"
)


@emitted
def float_tile(
    builder: Any, instruction_set: int, weight_type: int, add: int, left: Value, weights: Value, columns: Value,
    source: Value, source_stride: Value, out: Value, out_stride: Value, factor: Float,
) -> Value:  # fmt: skip
    """Like `tile_matmul` for a float tile, and float32 tokens `source_stride` bytes apart."""
    e = Emitter(builder, INSTRUCTION_SETS[instruction_set].lanes)

    def multiply(tokens: int) -> None:
        rows = [e.scaled(source, e.const(t), source_stride) for t in range(tokens)]
        sums = emit_float_tile(e, FLOAT_TYPES[weight_type], weights, columns, rows)
        store_sums(e, sums, out, out_stride, factor if add else None)

    return e.largest_within(left, WIDTHS, multiply)


@njit(inline="always")
def multiply_float_tile(
    instruction_set: int, weight_type: int, add: int, weights: int, columns: int, source: int, source_stride: int,
    out: int, out_stride: int, token: int, stop: int, factor: float,
) -> None:  # fmt: skip
    """Like `multiply_tile` for a float tile."""
    while token < stop:
        token += float_tile(
            instruction_set, weight_type, add, stop - token, weights, columns, source + token * source_stride,
            source_stride, out + token * out_stride, out_stride, factor,
        )  # fmt: skip


def make_float_linear(instruction_set: int, weight_type: int, add: int) -> Kernel:
    """The kernel of one weight type; shaped like `make_linear`."""
    row_bytes = 4 * INSTRUCTION_SETS[instruction_set].lanes

    @kernel(instruction_set, weight_type, add)
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
                    instruction_set, weight_type, add,
                    arguments.weights + tile * arguments.tile_stride, columns,
                    arguments.input, in_stride, arguments.out + tile * row_bytes, out_stride,
                    block, block_end, factor,
                )  # fmt: skip
        if arguments.bias != 0:
            add_bias(arguments.bias, arguments.out, out_stride, tokens,
                     start * row_bytes // 4, stop * row_bytes // 4, factor if add else np.float32(1.0))  # fmt: skip

    return float_linear
