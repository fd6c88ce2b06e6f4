"""One segment of keys for one tile of queries, and joining segments."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import literally

from realizar.backends.cpu.activation_layout import GROUP
from realizar.backends.cpu.codegen.attention_tile import NEVER, add_values, padded_queries, score_keys, softmax_row
from realizar.backends.cpu.kernels.attention_record import BATCH, SEGMENT, TILE
from realizar.backends.cpu.memory import clear, inner, view


class Tile(NamedTuple):
    """Some queries in one thread's scratch: token by token, and the heads of a KV head within.

    Attributes:
        count, computed_as: queries, and as how many they are computed (`padded_queries`).
        group: query heads per KV head. padded: head size in whole groups of 32.
        first_seen, last_seen: positions, of any query.
        bounds: int64 [TILE, 2], the first and the last position that each query sees.
        blocks: int32 block table of the row. head: the KV head's part of block 0.
        queries: float32 [TILE, padded], scaled. scores: float32 [TILE, SEGMENT], then weights.
        sums, totals: float32 [TILE, padded], of a segment and of all.
        states, running: float32 [TILE, 2], maximum and sum of weights, of a segment and of all.
        keys, values: the thread's float32 copy of a segment, if it has one (`attention_wide`).
    """

    count: int
    computed_as: int
    group: int
    padded: int
    first_seen: int
    last_seen: int
    bounds: int
    blocks: int
    head: int
    queries: int
    scores: int
    sums: int
    totals: int
    states: int
    running: int
    keys: int
    values: int


def segment_bytes(padded: int) -> int:
    return 4 * SEGMENT * padded


def tile_bytes(padded: int) -> int:
    return TILE * (4 * padded + 8)


def scratch_bytes(padded: int) -> int:
    """Scratch of one thread for a padded head size."""
    return TILE * (4 * (2 * padded + SEGMENT) + 8 + 16) + 2 * segment_bytes(padded) + BATCH * tile_bytes(padded)


computed_as, _segment_bytes, _tile_bytes = inner(padded_queries), inner(segment_bytes), inner(tile_bytes)


@inner
def place_tile(
    scratch: int, place: int, count: int, group: int, padded: int, first_seen: int, last_seen: int, blocks: int,
    head: int,
) -> Tile:  # fmt: skip
    """A tile whose arrays lie one after another in `scratch`; of those kept between segments, number `place`."""
    plane = TILE * padded * 4
    scores = scratch + plane
    sums = scores + TILE * SEGMENT * 4
    states = sums + plane
    bounds = states + TILE * 8
    keys = bounds + TILE * 16
    values = keys + _segment_bytes(padded)
    totals = values + _segment_bytes(padded) + place * _tile_bytes(padded)
    return Tile(
        count, computed_as(count), group, padded, first_seen, last_seen, bounds, blocks, head, scratch, scores, sums,
        totals, states, totals + plane, keys, values,
    )  # fmt: skip


@inner
def join(running: Any, total: Any, maximum: float, weight: float, part: Any) -> None:
    """Join a segment (maximum, weight, part) to the running state (running = [maximum, weight], total)."""
    if running[1] == 0:  # nothing yet: what the formula gives
        running[0], running[1] = maximum, weight
        for i in range(total.size):
            total[i] = part[i]
        return
    peak = max(running[0], maximum)
    before, after = np.float32(math.exp(running[0] - peak)), np.float32(math.exp(maximum - peak))
    running[1] = running[1] * before + weight * after
    for i in range(total.size):
        total[i] = total[i] * before + part[i] * after
    running[0] = peak


@inner
def finish(running: Any, total: Any, sinks: int, head: int, value_scale: float, out: Any) -> None:
    """Divide by the softmax's sum, a head's sink included, and multiply by the scale of values."""
    weight = running[1]
    factor = np.float32(1.0)
    if sinks != 0:
        sink = view(sinks, head + 1, np.float32)[head]
        peak = max(running[0], sink)
        factor = np.float32(math.exp(running[0] - peak))
        weight = weight * factor + np.float32(math.exp(sink - peak))
    factor = factor * value_scale / weight
    for i in range(out.size):
        out[i] = total[i] * factor


@inner
def score_segment(
    instruction_set: int, dtype: int, size: int, step: int, arguments: Any, tile: Tile, begin: int, low: int, high: int
) -> None:
    """Scores of keys low .. high - 1, and of other keys in their vectors."""
    _ = literally(instruction_set), literally(dtype)
    block_size, block_bytes = arguments.block_size, arguments.block_bytes
    plane = arguments.plane_bytes
    blocks = view(tile.blocks, high // block_size + 1, np.int32)
    for start in range(low // step * step, high, step):
        place = start % block_size
        keys = tile.head + blocks[start // block_size] * block_bytes
        score_keys(
            instruction_set, dtype, tile.computed_as, tile.queries, tile.padded * 4, tile.padded // GROUP,
            keys + place * size, block_size * size, keys + 2 * plane + place * 4, block_size * 4,
            tile.scores + (start - begin) * 4, SEGMENT * 4,
        )  # fmt: skip


@inner
def weigh_segment(instruction_set: int, lanes: int, arguments: Any, tile: Tile, begin: int) -> None:
    """Softmax of every query's scores; weights of keys that it does not see are zero."""
    _ = literally(instruction_set)
    cap, bounds = arguments.soft_cap, view(tile.bounds, 2 * TILE, np.int64)
    for i in range(tile.count):
        first, last = max(0, bounds[2 * i] - begin), min(SEGMENT, bounds[2 * i + 1] + 1 - begin)
        row, state = tile.scores + i * SEGMENT * 4, tile.states + i * 8
        start, stop = 0, 0
        if first >= last:
            empty = view(state, 2, np.float32)
            empty[0], empty[1] = NEVER, 0.0
        else:
            start, stop = first // lanes * lanes, (last + lanes - 1) // lanes * lanes
            if cap > 0:
                softmax_row(instruction_set, 1, row, first, last, cap, state)
            else:
                softmax_row(instruction_set, 0, row, first, last, cap, state)
        clear(row, start)
        clear(row + stop * 4, SEGMENT - stop)


@inner
def sum_segment(
    instruction_set: int, dtype: int, size: int, step: int, arguments: Any, tile: Tile, begin: int, low: int, high: int
) -> None:
    """Weighted sums of the values of keys low .. high - 1."""
    _ = literally(instruction_set), literally(dtype)
    block_size, block_bytes = arguments.block_size, arguments.block_bytes
    plane, scale_bytes = arguments.plane_bytes, arguments.scale_bytes
    blocks, groups = view(tile.blocks, high // block_size + 1, np.int32), tile.padded // GROUP
    clear(tile.sums, tile.computed_as * tile.padded)
    start = low // step * step
    while start < high:
        place = start % block_size
        count = min(block_size - place, high - start)
        values = tile.head + blocks[start // block_size] * block_bytes + plane
        scales = values + plane + scale_bytes + place * groups * 4
        values += place * tile.padded * size
        for dimension in range(0, tile.padded, step):
            add_values(
                instruction_set, dtype, tile.computed_as, tile.scores + (start - begin) * 4, SEGMENT * 4, count,
                values + dimension * size, tile.padded * size, scales + dimension // GROUP * 4, groups * 4,
                tile.sums + dimension * 4, tile.padded * 4,
            )  # fmt: skip
        start += count


@inner
def keys_of(tile: Tile, begin: int) -> tuple[int, int]:
    """First and last + 1 of a segment's keys that any query of a tile sees."""
    return max(begin, tile.first_seen), min(begin + SEGMENT, tile.last_seen + 1)
