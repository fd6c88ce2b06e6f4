"""Matmuls of quantised weights with quantised activations: the C functions that a step calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numba import njit

from realizar.backends.cpu.activation_layout import RECORD_BYTES
from realizar.backends.cpu.codegen.emit import Emitter
from realizar.backends.cpu.codegen.formats import format_at
from realizar.backends.cpu.codegen.tile import TileAddresses, TileEmitter
from realizar.backends.cpu.emitted import Float, Value, emitted
from realizar.backends.cpu.instruction_set import INSTRUCTION_SETS
from realizar.backends.cpu.kernel import Kernel, kernel
from realizar.backends.cpu.kernels.quantize import offset_of
from realizar.backends.cpu.memory import inner, read_i64, view
from realizar.backends.cpu.records import Record

LINEAR = Record(
    "step count_field codes scales supers table codes_stride scales_stride supers_stride tiles groups "
    "activations activation_groups out out_stride residual_scale=f32 bias together block_bytes"
)

# Tokens whose activations stay in the second-level cache while a thread's tiles pass: `block_bytes`, and these bounds.
BLOCK_TOKENS, LEAST_TOKENS = 96, 36


@emitted
def tile_matmul(
    builder: Any, instruction_set: int, weight_format: int, add: int, left: Value, codes: Value, scales: Value,
    supers: Value, table: Value, groups: Value, activations: Value, out: Value, out_stride: Value, factor: Float,
) -> Value:  # fmt: skip
    """out[t][out_features of the tile] = tile x token t, or out += factor * that if `add`. Addresses, bytes.

    Of `left` tokens as many as can share a pass over the tile; returns how many.
    """
    instructions = INSTRUCTION_SETS[instruction_set]
    group_stride = instructions.tile_tokens[0] * RECORD_BYTES
    e = Emitter(builder, instructions.lanes)
    tile = TileAddresses(codes, scales, supers, table, activations, groups, group_stride)

    def multiply(tokens: int) -> None:
        sums = TileEmitter(e, format_at(weight_format), instructions.name, tokens).emit(tile)
        store_sums(e, sums, out, out_stride, factor if add else None)

    return e.largest_within(left, instructions.tile_tokens, multiply)


def store_sums(e: Emitter, sums: Iterable[Value], out: Value, out_stride: Value, factor: Float | None) -> None:
    """out = sums, float32 lanes for each token, or out += factor * sums."""
    for t, value in enumerate(sums):
        address = e.scaled(out, e.const(t), out_stride)
        if factor is not None:
            value = e.fma(e.splat(factor), value, e.load(address, e.f32, 4))
        e.store(value, address)


@njit(inline="always")
def multiply_tile(
    instruction_set: int, weight_format: int, add: int, width: int, codes: int, scales: int, supers: int, table: int,
    groups: int, activations: int, record_groups: int, out: int, out_stride: int, token: int, stop: int, factor: float,
) -> None:  # fmt: skip
    """out[t][out_features of the tile] = tile x token t, or added as in `tile_matmul`, for `token` <= t < `stop`.

    `width` is that of a block of records. Inlined, so that the numbers before `codes` stay constants. `out` is the
    tile's place in the row of token 0.
    """
    while token < stop:
        token += tile_matmul(
            instruction_set, weight_format, add, stop - token, codes, scales, supers, table, groups,
            activations + offset_of(token, 0, record_groups, width), out + token * out_stride, out_stride, factor,
        )  # fmt: skip


@inner
def add_bias(bias: int, out: int, out_stride: int, tokens: int, start: int, stop: int, factor: float) -> None:
    """out[t][start:stop] += factor * bias[start:stop]: a thread finishes the out_features that it computed."""
    values = view(bias, stop, np.float32)
    for token in range(tokens):
        row = view(out + token * out_stride, stop, np.float32)
        for i in range(start, stop):
            row[i] += factor * values[i]


@inner
def run_of(tokens: int, groups: int, block_bytes: int, first: int, threads: int) -> int:
    """Tokens of a block: few enough that their activations stay in the second-level cache, and about a thread's share.

    `first` tokens share a pass over a tile; fewer than LEAST_TOKENS would not pay for reading the tile.
    """
    share = min(BLOCK_TOKENS, max(LEAST_TOKENS, (tokens + threads - 1) // threads))
    most = min((share + first - 1) // first, block_bytes // (groups * RECORD_BYTES) // first)
    return max(1, most) * first


@inner
def cut(tokens: int, run: int, first: int, tiles: int, share: int, thread: int, threads: int) -> Any:
    """The start of a thread's part: block of tokens, tile, and token in the block. It ends where the next one starts.

    Work goes by blocks of `run` tokens, then tiles, then `first` tokens, and is cut evenly. A thread meets few
    blocks so, and a block few threads: a line that all cores have read costs its next writer more than its own work.
    Where `share` is not 0, whole runs of `share` tiles, with all tokens of a block, stay with one thread.
    """
    passes, whole = (tokens + first - 1) // first, run // first
    at = passes * tiles * thread // threads
    block = at // (whole * tiles)
    here = min(whole, passes - block * whole)
    if here <= 0:
        return block, 0, 0
    at -= block * whole * tiles
    tile = at // here
    if share != 0:
        return block, tile // share * share, 0
    return block, tile, at % here * first


def make_linear(instruction_set: int, weight_format: int, add: int) -> Kernel:
    """The kernel of one format. `together`: tiles that stay with one thread, which goes on with them itself, or 0."""
    width, row_bytes = INSTRUCTION_SETS[instruction_set].tile_tokens[0], 4 * INSTRUCTION_SETS[instruction_set].lanes

    @kernel(instruction_set, weight_format, add)
    def linear(address: int, thread: int, threads: int) -> None:
        arguments = LINEAR(address)
        tokens = read_i64(arguments.step, arguments.count_field)
        tiles, together, groups = arguments.tiles, arguments.together, arguments.groups
        record_groups, out_stride = arguments.activation_groups, arguments.out_stride
        factor, table, activations = arguments.residual_scale, arguments.table, arguments.activations
        run = run_of(tokens, groups, arguments.block_bytes, width, threads)
        block, tile, skipped = cut(tokens, run, width, tiles, together, thread, threads)
        last_block, last_tile, last_skipped = cut(tokens, run, width, tiles, together, thread + 1, threads)
        while block < last_block or (block == last_block and (tile < last_tile or skipped < last_skipped)):
            end_tile = last_tile + (last_skipped > 0) if block == last_block else tiles
            while tile < end_tile:
                token, block_end = block * run + skipped, min((block + 1) * run, tokens)
                if block == last_block and tile == last_tile:
                    block_end = block * run + last_skipped
                skipped = 0
                at = arguments.out + tile * row_bytes
                multiply_tile(
                    instruction_set, weight_format, add, width,
                    arguments.codes + tile * arguments.codes_stride,
                    arguments.scales + tile * arguments.scales_stride,
                    arguments.supers + tile * arguments.supers_stride,
                    table, groups, activations, record_groups, at, out_stride, token, block_end, factor,
                )  # fmt: skip
                if arguments.bias != 0:
                    add_bias(arguments.bias, arguments.out + token * out_stride, out_stride,
                             block_end - token, tile * row_bytes // 4, (tile + 1) * row_bytes // 4,
                             factor if add else np.float32(1.0))  # fmt: skip
                tile += 1
            block, tile = block + 1, 0

    return linear
