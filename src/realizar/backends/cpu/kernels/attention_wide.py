"""One segment for many tiles of queries: its keys and values converted to float32 once, by each thread for its tiles.

The arithmetic is `attention_segment`'s on the same numbers, so a query's bits are the same by either way.
"""

from __future__ import annotations

import numpy as np
from numba import literally

from realizar.backends.cpu.codegen.attention_tile import add_values, score_keys, widen_run
from realizar.backends.cpu.kernels import attention_record as record
from realizar.backends.cpu.kernels.attention_record import SEGMENT, TILE
from realizar.backends.cpu.kernels.attention_segment import Tile
from realizar.backends.cpu.kv.layout import KV_DTYPES
from realizar.backends.cpu.memory import clear, inner, load_i64, view
from realizar.backends.cpu.weights.formats import GROUP

_F32 = KV_DTYPES.index("f32")


@inner
def widen_segment(
    instruction_set: int, dtype: int, size: int, step: int, arguments: int, tile: Tile, begin: int, low: int, high: int
) -> None:
    """Keys and values low .. high - 1 of a segment, and keys that share their vectors, to the thread's scratch.

    keys float32 [SEGMENT / step, padded, step], values float32 [padded / step, SEGMENT, step]: as they are read.
    """
    _ = literally(instruction_set), literally(dtype)
    block_size, block_bytes = load_i64(arguments, record.BLOCK_SIZE), load_i64(arguments, record.BLOCK_BYTES)
    plane, padded = load_i64(arguments, record.PLANE_BYTES), tile.padded
    blocks = view(tile.blocks, high // block_size + 1, np.int32)
    for start in range(low // step * step, high, step):
        place, at = start % block_size, start - begin
        keys = tile.head + blocks[start // block_size] * block_bytes
        widen_run(instruction_set, dtype, keys + place * size, block_size * size, padded, tile.keys + at * padded * 4)
        values = keys + plane + place * padded * size
        for dimension in range(0, padded, step):
            widen_run(
                instruction_set, dtype, values + dimension * size, padded * size, min(step, high - start),
                tile.values + (dimension * SEGMENT + at * step) * 4,
            )  # fmt: skip


@inner
def score_wide(instruction_set: int, step: int, tile: Tile, begin: int, low: int, high: int) -> None:
    """Like `score_segment`, from the output of `widen_segment`. All TILE queries are computed; unused ones are zero."""
    _ = literally(instruction_set)
    for start in range(low // step * step, high, step):
        score_keys(
            instruction_set, _F32, TILE, tile.queries, tile.padded * 4, tile.padded // GROUP,
            tile.keys + (start - begin) * tile.padded * 4, step * 4, 0, 0, tile.scores + (start - begin) * 4,
            SEGMENT * 4,
        )  # fmt: skip


@inner
def sum_wide(instruction_set: int, step: int, tile: Tile, begin: int, low: int, high: int) -> None:
    """Like `sum_segment`, from the output of `widen_segment`, for all TILE queries."""
    _ = literally(instruction_set)
    clear(tile.sums, TILE * tile.padded)
    first = low // step * step
    for dimension in range(0, tile.padded, step):
        add_values(
            instruction_set, _F32, TILE, tile.scores + (first - begin) * 4, SEGMENT * 4, high - first,
            tile.values + (dimension * SEGMENT + (first - begin) * step) * 4, step * 4, 0, 0,
            tile.sums + dimension * 4, tile.padded * 4,
        )  # fmt: skip
