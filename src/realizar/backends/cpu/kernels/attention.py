"""Attention over paged KV blocks, causal or over whole rows, for chunks of prompts and single tokens alike.

The context is cut into segments of 256 keys at fixed positions. A segment's softmax is computed by itself and merged
into the running state in order, so a query's bits depend on its own context alone: not on the chunk, the batch, the
block table or the thread. Where there are few queries, segments go to different threads and `combine` merges them by
the same arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import literally

from realizar.backends.cpu.activation_layout import GROUP
from realizar.backends.cpu.codegen.attention_tile import NEVER, add_values, score_keys, widen_run
from realizar.backends.cpu.instruction_set import INSTRUCTION_SETS
from realizar.backends.cpu.kernel import Kernel, kernel
from realizar.backends.cpu.kernels.attention_record import (
    ATTEND,
    BATCH,
    ROW_FIELDS,
    SEGMENT,
    STEP_ROWS,
    STEP_SPLIT,
    STEP_TOKENS,
    TILE,
    first_seen,
    last_seen,
    segments_of,
)
from realizar.backends.cpu.kernels.attention_segment import (
    Tile,
    finish,
    join,
    keys_of,
    place_tile,
    score_segment,
    sum_segment,
    weigh_segment,
)
from realizar.backends.cpu.kernels.quantize import gate_group, offset_of, quantize_group
from realizar.backends.cpu.kv.layout import ELEMENT_BYTES, KV_DTYPES
from realizar.backends.cpu.memory import clear, inner, read_i64, view

# One segment for many tiles of queries: its keys and values converted to float32 once, by each thread for its tiles.
#
# The arithmetic is `attention_segment`'s on the same numbers, so a query's bits are the same by either way.

_F32 = KV_DTYPES.index("f32")


@inner
def _widen_segment(
    instruction_set: int, dtype: int, size: int, step: int, arguments: Any, tile: Tile, begin: int, low: int, high: int
) -> None:
    """Keys and values low .. high - 1 of a segment, and keys that share their vectors, to the thread's scratch.

    keys float32 [SEGMENT / step, padded, step], values float32 [padded / step, SEGMENT, step]: as they are read.
    """
    _ = literally(instruction_set), literally(dtype)
    block_size, block_bytes = arguments.block_size, arguments.block_bytes
    plane, padded = arguments.plane_bytes, tile.padded
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
def _score_wide(instruction_set: int, step: int, tile: Tile, begin: int, low: int, high: int) -> None:
    """As `score_segment`, from the output of `_widen_segment`. All TILE queries are computed; unused ones are zero."""
    _ = literally(instruction_set)
    for start in range(low // step * step, high, step):
        score_keys(
            instruction_set, _F32, TILE, tile.queries, tile.padded * 4, tile.padded // GROUP,
            tile.keys + (start - begin) * tile.padded * 4, step * 4, 0, 0, tile.scores + (start - begin) * 4,
            SEGMENT * 4,
        )  # fmt: skip


@inner
def _sum_wide(instruction_set: int, step: int, tile: Tile, begin: int, low: int, high: int) -> None:
    """Like `sum_segment`, from the output of `_widen_segment`, for all TILE queries."""
    _ = literally(instruction_set)
    clear(tile.sums, TILE * tile.padded)
    first = low // step * step
    for dimension in range(0, tile.padded, step):
        add_values(
            instruction_set, _F32, TILE, tile.scores + (first - begin) * 4, SEGMENT * 4, high - first,
            tile.values + (dimension * SEGMENT + (first - begin) * step) * 4, step * 4, 0, 0,
            tile.sums + dimension * 4, tile.padded * 4,
        )  # fmt: skip


_TOGETHER = 3  # tiles of a thread from which turning a segment to float32 pays


@inner
def open_tile(arguments: Any, thread: int, place: int, row: int, kv_head: int, first: int, fresh: bool) -> Tile:
    """The tile of a row's queries from `first` on, with nothing attended yet where `fresh`.

    `place` numbers the tiles of a thread that are open at once.
    """
    group, head_size = arguments.num_heads // arguments.num_kv_heads, arguments.head_size
    padded = (head_size + GROUP - 1) // GROUP * GROUP
    rows = arguments.rows + row * ROW_FIELDS * 8
    first_token, num_tokens = read_i64(rows, 0), read_i64(rows, 1)
    count = min(TILE, num_tokens * group - first)
    tile = place_tile(
        arguments.scratch + thread * arguments.scratch_bytes, place, count, group, padded,
        first_seen(arguments, row, first), last_seen(arguments, row, first + count - 1),
        arguments.block_table + row * arguments.table_stride,
        arguments.cache + kv_head * arguments.head_bytes,
    )  # fmt: skip
    scale = arguments.scale * arguments.key_scale
    bounds = view(tile.bounds, 2 * TILE, np.int64)
    running = view(tile.running, 2 * TILE, np.float32)
    clear(tile.queries, TILE * padded)
    if fresh:
        clear(tile.totals, count * padded)
    token, head = first_token + first // group, first % group
    query = arguments.query + kv_head * group * head_size * 4
    for i in range(count):
        at = query + token * arguments.query_stride + head * head_size * 4
        source, target = view(at, head_size, np.float32), view(tile.queries + i * padded * 4, head_size, np.float32)
        for d in range(head_size):
            target[d] = source[d] * scale
        bounds[2 * i], bounds[2 * i + 1] = first_seen(arguments, row, first + i), last_seen(arguments, row, first + i)
        if fresh:
            running[2 * i], running[2 * i + 1] = NEVER, 0.0
        head += 1
        if head == group:
            token, head = token + 1, 0
    return tile


@inner
def keep_segment(arguments: Any, tile: Tile, token: int, head: int, first_head: int, segment: int, split: int) -> None:
    """Store a segment's result for `combine`: the tile starts at `token` and at `head` of its group."""
    heads, padded = arguments.num_heads, tile.padded
    for i in range(tile.count):
        flat = token * heads + first_head + head
        kept = view(arguments.partial + (flat * split + segment) * (padded + 2) * 4, padded + 2, np.float32)
        state, sums = view(tile.states + i * 8, 2, np.float32), view(tile.sums + i * padded * 4, padded, np.float32)
        kept[0], kept[1] = state[0], state[1]
        for d in range(padded):
            kept[d + 2] = sums[d]
        head += 1
        if head == tile.group:
            token, head = token + 1, 0


@inner
def join_segment(tile: Tile) -> None:
    for i in range(tile.count):
        state = view(tile.states + i * 8, 2, np.float32)
        join(
            view(tile.running + i * 8, 2, np.float32), view(tile.totals + i * tile.padded * 4, tile.padded, np.float32),
            state[0], state[1], view(tile.sums + i * tile.padded * 4, tile.padded, np.float32),
        )  # fmt: skip


@inner
def write_tile(arguments: Any, tile: Tile, token: int, head: int, first_head: int) -> None:
    """Divide and store the outputs."""
    head_size, sinks, scale = arguments.head_size, arguments.sinks, arguments.value_scale
    for i in range(tile.count):
        at = arguments.out + token * arguments.out_stride
        out = view(at + (first_head + head) * head_size * 4, head_size, np.float32)
        total = view(tile.totals + i * tile.padded * 4, tile.padded, np.float32)
        finish(view(tile.running + i * 8, 2, np.float32), total, sinks, first_head + head, scale, out)
        head += 1
        if head == tile.group:
            token, head = token + 1, 0


@inner
def attend_tiles(
    instruction_set: int, dtype: int, lanes: int, size: int, arguments: Any, thread: int, row: int, kv_head: int,
    first: int, stop: int, stride: int, wide: bool, split: int, only_segment: int,
) -> None:  # fmt: skip
    """All segments of tiles first, first + stride .. below stop, at most BATCH of them; or, split, one segment.

    Where `wide`, a segment is converted to float32 once for all of them. One function for all cases, and few levels of
    calls: Numba optimises what a function calls again with each of its callers.
    """
    _ = literally(instruction_set), literally(dtype)
    step = 32 if lanes > 8 else 16  # lanes * vectors_of(lanes)
    group = arguments.num_heads // arguments.num_kv_heads
    rows = arguments.rows + row * ROW_FIELDS * 8
    queries = read_i64(rows, 1) * group
    last = first + (stop - 1 - first) // stride * stride
    end = last_seen(arguments, row, min((last + 1) * TILE, queries) - 1) + 1
    lowest, highest = first_seen(arguments, row, first * TILE) // SEGMENT, (end - 1) // SEGMENT
    if split > 0:
        lowest, highest = only_segment, only_segment
    for segment in range(lowest, highest + 1):
        begin, widened = segment * SEGMENT, False
        for place in range((last - first) // stride + 1):
            query = (first + place * stride) * TILE
            final = min(query + TILE, queries) - 1
            earliest, latest = segments_of(arguments, row, query, final)
            if segment < earliest or segment > latest:
                continue
            fresh = split > 0 or segment == earliest
            tile = open_tile(arguments, thread, place, row, kv_head, query, fresh)
            low, high = keys_of(tile, begin)
            if wide:
                if not widened:
                    most = min(begin + SEGMENT, end)
                    _widen_segment(instruction_set, dtype, size, step, arguments, tile, begin, low, most)
                    widened = True
                _score_wide(instruction_set, step, tile, begin, low, high)
            else:
                score_segment(instruction_set, dtype, size, step, arguments, tile, begin, low, high)
            weigh_segment(instruction_set, lanes, arguments, tile, begin)
            if wide:
                _sum_wide(instruction_set, step, tile, begin, low, high)
            else:
                sum_segment(instruction_set, dtype, size, step, arguments, tile, begin, low, high)
            token, head = read_i64(rows, 0) + query // group, query % group
            if split > 0:
                keep_segment(arguments, tile, token, head, kv_head * group, segment, split)
                continue
            join_segment(tile)
            if segment == latest:
                write_tile(arguments, tile, token, head, kv_head * group)


def make_attend(instruction_set: int, dtype: int) -> Kernel:
    """The kernel for one KV element type. Units: (row, KV head, tile of queries), and the segment where split.

    A thread that has several tiles of a row and KV head takes them together, but for int8, where each score is scaled.
    """
    lanes, size = INSTRUCTION_SETS[instruction_set].lanes, ELEMENT_BYTES[KV_DTYPES[dtype]]
    least = _TOGETHER if KV_DTYPES[dtype] in ("f16", "bf16", "fp8") else 1 << 30

    @kernel(instruction_set, dtype)
    def attend(address: int, thread: int, threads: int) -> None:
        arguments = ATTEND(address)
        step = arguments.step
        num_rows, split = read_i64(step, STEP_ROWS), read_i64(step, STEP_SPLIT)
        kv_heads, group = arguments.num_kv_heads, arguments.num_heads // arguments.num_kv_heads
        unit = 0
        for row in range(num_rows):
            at = arguments.rows + row * ROW_FIELDS * 8
            queries = read_i64(at, 1) * group
            tiles = (queries + TILE - 1) // TILE
            wide = split == 0 and tiles >= least * threads
            for kv_head in range(kv_heads):
                first = (thread - unit) % threads if wide else 0
                stride = threads if wide else 1
                together = BATCH * threads if wide else 1
                while first < tiles:
                    low, high = 0, 0
                    if split > 0:
                        final = min((first + 1) * TILE, queries) - 1
                        low, high = segments_of(arguments, row, first * TILE, final)
                    for segment in range(low, high + 1):
                        if wide or unit % threads == thread:
                            attend_tiles(
                                instruction_set, dtype, lanes, size, arguments, thread, row, kv_head, first,
                                min(tiles, first + together), stride, wide, split, segment,
                            )  # fmt: skip
                        unit += not wide
                    first += together
                unit += tiles if wide else 0

    return attend


@kernel()
def combine(address: int, thread: int, threads: int) -> None:
    """Combine split segments, and gate and quantise the rows of the output. It runs after a barrier."""
    arguments = ATTEND(address)
    step = arguments.step
    num_rows, split = read_i64(step, STEP_ROWS), read_i64(step, STEP_SPLIT)
    heads, size = arguments.num_heads, arguments.head_size
    padded = (size + GROUP - 1) // GROUP * GROUP
    width = heads * size
    running, total = np.zeros(2, np.float32), np.zeros(padded, np.float32)
    records, gate, scale = arguments.records, arguments.gate, arguments.value_scale
    tokens = read_i64(step, STEP_TOKENS)
    start, stop = tokens * thread // threads, tokens * (thread + 1) // threads
    for row in range(num_rows):
        at = arguments.rows + row * ROW_FIELDS * 8
        first_token, num_tokens = read_i64(at, 0), read_i64(at, 1)
        for token in range(max(start, first_token), min(stop, first_token + num_tokens)):
            out = arguments.out + token * arguments.out_stride
            if split > 0:
                query = (token - first_token) * (heads // arguments.num_kv_heads)
                first, last = segments_of(arguments, row, query, query)
                for head in range(heads):
                    running[0], running[1] = NEVER, 0.0
                    total[:] = 0.0
                    for segment in range(first, last + 1):
                        place = (token * heads + head) * split + segment
                        kept = view(arguments.partial + place * (padded + 2) * 4, padded + 2, np.float32)
                        join(running, total, kept[0], kept[1], kept[2:])
                    own = view(out + head * size * 4, size, np.float32)
                    finish(running, total, arguments.sinks, head, scale, own)
            if gate != 0:
                gates = gate + token * arguments.gate_stride
                for group in range((width + GROUP - 1) // GROUP):
                    gate_group(out + group * GROUP * 4, gates + group * GROUP * 4)
            if records != 0:
                groups, lanes = arguments.records_groups, arguments.records_width
                for group in range((width + GROUP - 1) // GROUP):
                    quantize_group(out + group * GROUP * 4, records + offset_of(token, group, groups, lanes))
