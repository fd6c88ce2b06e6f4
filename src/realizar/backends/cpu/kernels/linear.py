"""Products of quantised weights with quantised activations: the C functions that a step calls."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cfunc, njit, types
from numba.extending import intrinsic

from realizar.backends.cpu.activation_layout import RECORD_BYTES
from realizar.backends.cpu.emit import Emitter
from realizar.backends.cpu.formats import format_at
from realizar.backends.cpu.instruction_set import INSTRUCTION_SETS
from realizar.backends.cpu.kernels.quantize import offset_of
from realizar.backends.cpu.memory import load_f32, load_i64, view
from realizar.backends.cpu.records import Record
from realizar.backends.cpu.tile import TileAddresses, TileEmitter

LINEAR = Record(
    "step count_field codes scales supers table codes_stride scales_stride supers_stride tiles groups "
    "activations activation_groups out out_stride residual_scale bias together"
)
(
    _STEP, _COUNT, _CODES, _SCALES, _SUPERS, _TABLE, _CODES_STRIDE, _SCALES_STRIDE, _SUPERS_STRIDE, _TILES, _GROUPS,
    _ACTIVATIONS, _ACTIVATION_GROUPS, _OUT, _OUT_STRIDE, _RESIDUAL_SCALE, _BIAS,
    _TOGETHER,
) = range(18)  # fmt: skip

# Activations that stay in the second-level cache while a thread's tiles pass: at most so many tokens and bytes.
BLOCK_TOKENS, BLOCK_BYTES = 96, 384 * 1024


@intrinsic(prefer_literal=True)
def tile_product(
    typing_context: Any, instruction_set: Any, weight_format: Any, tokens: Any, add: Any, codes: Any, scales: Any,
    supers: Any, table: Any, groups: Any, activations: Any, out: Any, out_stride: Any,
    residual_scale: Any,
) -> Any:  # fmt: skip
    """out[t][rows] = tile x token t, or out += residual_scale * that where `add`. Addresses, and bytes."""
    constants = [instruction_set, weight_format, tokens, add]
    if not all(isinstance(constant, types.IntegerLiteral) for constant in constants):
        return None
    signature = types.void(*constants, *[types.int64] * 8, types.float32)
    instructions = INSTRUCTION_SETS[instruction_set.literal_value]
    group_stride = instructions.tile_tokens[0] * RECORD_BYTES
    form, count, adds = format_at(weight_format.literal_value), tokens.literal_value, add.literal_value

    def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        codes, scales, supers, table, groups, activations, out, out_stride, factor = arguments[4:]
        e = Emitter(builder, instructions.lanes)
        tile = TileAddresses(codes, scales, supers, table, activations, groups, group_stride)
        sums = TileEmitter(e, form, instructions.name, count).emit(tile)
        for t, value in enumerate(sums):
            address = e.scaled(out, e.const(t), out_stride)
            if adds:
                value = e.fma(e.splat(factor), value, e.load(address, e.f32, 4))
            e.store(value, address)
        return context.get_dummy_value()

    return signature, codegen


@njit
def add_bias(bias: int, out: int, out_stride: int, tokens: int, start: int, stop: int, factor: float) -> None:
    """out[t][start:stop] += factor * bias[start:stop]: a thread finishes the rows that it computed."""
    values = view(bias, stop, np.float32)
    for token in range(tokens):
        row = view(out + token * out_stride, stop, np.float32)
        for i in range(start, stop):
            row[i] += factor * values[i]


def make_linear(instruction_set: int, weight_format: int, add: int) -> Any:
    """The kernel of one format: a thread takes a run of (tile, block of tokens), so that few tiles share out evenly.

    Where `together` is not 0, it takes whole runs of so many tiles, all tokens: columns that it goes on with by itself.
    """
    widths = INSTRUCTION_SETS[instruction_set].tile_tokens
    assert len(widths) <= 4
    first, second, third, fourth = (*widths, *[1] * (4 - len(widths)))
    row_bytes = 4 * INSTRUCTION_SETS[instruction_set].lanes

    @cfunc(types.void(types.int64, types.int64, types.int64), cache=True)
    def linear(arguments: int, thread: int, threads: int) -> None:
        tokens = load_i64(load_i64(arguments, _STEP), load_i64(arguments, _COUNT))
        tiles, together = load_i64(arguments, _TILES), load_i64(arguments, _TOGETHER)
        groups = load_i64(arguments, _GROUPS)
        record_groups, out_stride = load_i64(arguments, _ACTIVATION_GROUPS), load_i64(arguments, _OUT_STRIDE)
        factor = load_f32(arguments, _RESIDUAL_SCALE)
        table = load_i64(arguments, _TABLE)
        run = max(1, min(BLOCK_TOKENS, BLOCK_BYTES // (groups * RECORD_BYTES)) // first) * first
        blocks = (tokens + run - 1) // run
        share = max(blocks, 1) * together if together != 0 else 1
        start = tiles * blocks // share * thread // threads * share
        stop = tiles * blocks // share * (thread + 1) // threads * share
        for part in range(blocks):
            block, block_end = part * run, min((part + 1) * run, tokens)
            for tile in range((start - part + blocks - 1) // blocks, (stop - part + blocks - 1) // blocks):
                codes = load_i64(arguments, _CODES) + tile * load_i64(arguments, _CODES_STRIDE)
                scales = load_i64(arguments, _SCALES) + tile * load_i64(arguments, _SCALES_STRIDE)
                supers = load_i64(arguments, _SUPERS) + tile * load_i64(arguments, _SUPERS_STRIDE)
                token = block
                while token < block_end:
                    x = load_i64(arguments, _ACTIVATIONS) + offset_of(token, 0, record_groups, first)
                    y = load_i64(arguments, _OUT) + token * out_stride + tile * row_bytes
                    left = block_end - token
                    if left >= first:
                        tile_product(instruction_set, weight_format, first, add, codes, scales, supers, table, groups,
                                     x, y, out_stride, factor)  # fmt: skip
                        token += first
                    elif left >= second:
                        tile_product(instruction_set, weight_format, second, add, codes, scales, supers, table, groups,
                                     x, y, out_stride, factor)  # fmt: skip
                        token += second
                    elif left >= third:
                        tile_product(instruction_set, weight_format, third, add, codes, scales, supers, table, groups,
                                     x, y, out_stride, factor)  # fmt: skip
                        token += third
                    else:
                        tile_product(instruction_set, weight_format, fourth, add, codes, scales, supers, table, groups,
                                     x, y, out_stride, factor)  # fmt: skip
                        token += fourth
                if load_i64(arguments, _BIAS) != 0:
                    add_bias(load_i64(arguments, _BIAS), load_i64(arguments, _OUT) + block * out_stride, out_stride,
                             block_end - block, tile * row_bytes // 4, (tile + 1) * row_bytes // 4,
                             factor if add else np.float32(1.0))  # fmt: skip

    return linear
