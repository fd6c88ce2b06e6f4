"""Causal attention over paged KV blocks, for chunks of prompts and single tokens alike.

The context is cut into segments of 256 keys at fixed positions. A segment's softmax is computed from nothing and joined
to the running state in order, so a query's bits depend on its own context alone: not on the chunk, the batch, the
block table or the thread. Where there are few queries, segments go to different threads and `combine` joins them by
the same arithmetic.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cfunc, literally, njit, types

from realizar.backends.cpu.attention_tile import NEVER, add_values, score_keys, softmax_row
from realizar.backends.cpu.formats import GROUP
from realizar.backends.cpu.instruction_set import INSTRUCTION_SETS
from realizar.backends.cpu.kernels.quantize import offset_of, quantize_group
from realizar.backends.cpu.kv_layout import ELEMENT_BYTES, KV_DTYPES
from realizar.backends.cpu.memory import load_f32, load_i64, view
from realizar.backends.cpu.records import Record

SEGMENT = 256  # keys whose softmax is computed at once
TILE = 8  # queries at once
ROW_FIELDS = 3  # per row of the step, int64: first token, tokens, tokens computed before

# partial: float32 [tokens * heads, max_segments, 2 + padded head size] of maximum, sum, weighted values
ATTEND = Record(
    "step query query_stride num_heads num_kv_heads head_size scale window soft_cap sinks cache block_bytes head_bytes "
    "plane_bytes scale_bytes block_size rows block_table table_stride scratch scratch_bytes out out_stride partial "
    "records records_groups records_width"
)
(
    _STEP, _QUERY, _QUERY_STRIDE, _HEADS, _KV_HEADS, _HEAD_SIZE, _SCALE, _WINDOW, _SOFT_CAP, _SINKS, _CACHE,
    _BLOCK_BYTES, _HEAD_BYTES, _PLANE_BYTES, _SCALE_BYTES, _BLOCK_SIZE, _ROWS, _BLOCK_TABLE, _TABLE_STRIDE, _SCRATCH,
    _SCRATCH_BYTES, _OUT, _OUT_STRIDE, _PARTIAL, _RECORDS, _RECORDS_GROUPS,
    _RECORDS_WIDTH,
) = range(27)  # fmt: skip

# The step record: split is segments per query, or 0; terms is twice the tokens.
STEP_TOKENS, STEP_SELECTED, STEP_ROWS, STEP_SPLIT, STEP_TERMS = range(5)


def scratch_bytes(padded_head_size: int) -> int:
    """Scratch of one thread: queries, scores, a segment's sums, running sums, and three floats of state per query."""
    return (TILE * (3 * padded_head_size + SEGMENT) + 4 * TILE) * 4


@njit
def join(running: Any, total: Any, maximum: float, weight: float, part: Any) -> None:
    """Join a segment (maximum, weight, part) to the running state (running = [maximum, weight], total)."""
    if running[1] == 0:  # nothing yet: what the formula gives
        running[0], running[1] = maximum, weight
        total[:] = part
        return
    peak = max(running[0], maximum)
    before, after = np.float32(math.exp(running[0] - peak)), np.float32(math.exp(maximum - peak))
    running[1] = running[1] * before + weight * after
    for i in range(total.size):
        total[i] = total[i] * before + part[i] * after
    running[0] = peak


@njit
def finish(running: Any, total: Any, sinks: int, head: int, out: Any) -> None:
    """Divide by the softmax's sum, a head's sink included."""
    weight = running[1]
    factor = np.float32(1.0)
    if sinks != 0:
        sink = view(sinks, head + 1, np.float32)[head]
        peak = max(running[0], sink)
        factor = np.float32(math.exp(running[0] - peak))
        weight = weight * factor + np.float32(math.exp(sink - peak))
    factor /= weight
    for i in range(out.size):
        out[i] = total[i] * factor


@njit
def scores_of(
    instruction_set: int,
    dtype: int,
    size: int,
    variant: int,
    query: int,
    padded: int,
    keys: int,
    block_size: int,
    scales: int,
    out: int,
) -> None:
    _ = literally(instruction_set), literally(dtype)
    stride, key_stride, groups = padded * 4, block_size * size, padded // GROUP
    if variant == 8:
        score_keys(
            instruction_set, dtype, 8, query, stride, groups, keys, key_stride, scales, block_size * 4, out, SEGMENT * 4
        )
    elif variant == 4:
        score_keys(
            instruction_set, dtype, 4, query, stride, groups, keys, key_stride, scales, block_size * 4, out, SEGMENT * 4
        )
    else:
        score_keys(
            instruction_set, dtype, 1, query, stride, groups, keys, key_stride, scales, block_size * 4, out, SEGMENT * 4
        )


@njit
def values_of(
    instruction_set: int,
    dtype: int,
    size: int,
    variant: int,
    weights: int,
    count: int,
    values: int,
    padded: int,
    scales: int,
    scale_stride: int,
    out: int,
) -> None:
    _ = literally(instruction_set), literally(dtype)
    stride = padded * size
    if variant == 8:
        add_values(
            instruction_set,
            dtype,
            8,
            weights,
            SEGMENT * 4,
            count,
            values,
            stride,
            scales,
            scale_stride,
            out,
            padded * 4,
        )
    elif variant == 4:
        add_values(
            instruction_set,
            dtype,
            4,
            weights,
            SEGMENT * 4,
            count,
            values,
            stride,
            scales,
            scale_stride,
            out,
            padded * 4,
        )
    else:
        add_values(
            instruction_set,
            dtype,
            1,
            weights,
            SEGMENT * 4,
            count,
            values,
            stride,
            scales,
            scale_stride,
            out,
            padded * 4,
        )


@njit
def segment_of(
    instruction_set: int, dtype: int, lanes: int, size: int, arguments: int, table: int, kv_head: int, variant: int, count: int, first_position: int, tile: int, group: int,
    segment: int, padded: int, query: int, scores: int, sums: int, states: int,
) -> None:  # fmt: skip
    """Maximum, sum and weighted values of `count` queries with the keys of one segment."""
    _ = literally(instruction_set), literally(dtype)
    step = 32 if lanes > 8 else 16  # vectors_of(lanes) * lanes
    block_size, window = load_i64(arguments, _BLOCK_SIZE), load_i64(arguments, _WINDOW)
    plane, scale_bytes = load_i64(arguments, _PLANE_BYTES), load_i64(arguments, _SCALE_BYTES)
    cap = load_f32(arguments, _SOFT_CAP)
    last_position = first_position + (tile + count - 1) // group
    begin = segment * SEGMENT
    low = begin
    if window > 0:
        low = max(begin, first_position + tile // group - window + 1)
    high = min(begin + SEGMENT, last_position + 1)
    head_at = load_i64(arguments, _CACHE) + kv_head * load_i64(arguments, _HEAD_BYTES)
    blocks = view(table, high // block_size + 1, np.int32)
    for start in range(low // step * step, high, step):
        at = head_at + blocks[start // block_size] * load_i64(arguments, _BLOCK_BYTES)
        place = start % block_size
        scores_of(
            instruction_set,
            dtype,
            size,
            variant,
            query,
            padded,
            at + place * size,
            block_size,
            at + 2 * plane + place * 4,
            scores + (start - begin) * 4,
        )
    for i in range(count):
        position = first_position + (tile + i) // group
        key_low = begin if window <= 0 else max(begin, position - window + 1)
        key_high = min(begin + SEGMENT, position + 1)
        row = scores + i * SEGMENT * 4
        if key_low >= key_high:
            state = view(states + i * 8, 2, np.float32)
            state[0], state[1] = NEVER, 0.0
            view(row, SEGMENT, np.float32)[:] = 0.0
        elif cap > 0:
            softmax_row(instruction_set, 1, row, key_low - begin, key_high - begin, cap, states + i * 8)
        else:
            softmax_row(instruction_set, 0, row, key_low - begin, key_high - begin, cap, states + i * 8)
        used = min(SEGMENT, (max(key_high - begin, 0) + lanes - 1) // lanes * lanes)
        view(row, SEGMENT, np.float32)[used:] = 0.0
    view(sums, variant * padded, np.float32)[:] = 0.0
    low = low // block_size * block_size
    groups = padded // GROUP
    for start in range(low, high, block_size):
        at = head_at + blocks[start // block_size] * load_i64(arguments, _BLOCK_BYTES) + plane
        scale_at = at + plane + scale_bytes
        tokens = min(block_size, high - start)
        for dimension in range(0, padded, step):
            values_of(instruction_set, dtype, size, variant, scores + (start - begin) * 4, tokens, at + dimension * size, padded,
                      scale_at + dimension // GROUP * 4, groups * 4, sums + dimension * 4)  # fmt: skip


@njit
def unit_of(
    instruction_set: int,
    dtype: int,
    lanes: int,
    size: int,
    arguments: int,
    thread: int,
    row: int,
    kv_head: int,
    tile: int,
    only_segment: int,
    split: int,
) -> None:
    _ = literally(instruction_set), literally(dtype)
    heads, kv_heads, head_size = (
        load_i64(arguments, _HEADS),
        load_i64(arguments, _KV_HEADS),
        load_i64(arguments, _HEAD_SIZE),
    )
    group, padded = heads // kv_heads, (head_size + GROUP - 1) // GROUP * GROUP
    rows = load_i64(arguments, _ROWS) + row * ROW_FIELDS * 8
    first_token, num_tokens, computed = load_i64(rows, 0), load_i64(rows, 1), load_i64(rows, 2)
    count = min(TILE, num_tokens * group - tile)
    variant = 8 if count > 4 else (4 if count > 1 else 1)
    scratch = load_i64(arguments, _SCRATCH) + thread * load_i64(arguments, _SCRATCH_BYTES)
    scores = scratch + TILE * padded * 4
    sums = scores + TILE * SEGMENT * 4
    totals = sums + TILE * padded * 4
    states = totals + TILE * padded * 4
    running_at = states + TILE * 8
    scale = load_f32(arguments, _SCALE)
    view(scratch, variant * padded, np.float32)[:] = 0.0
    for i in range(count):
        token, head = first_token + (tile + i) // group, kv_head * group + (tile + i) % group
        source = view(
            load_i64(arguments, _QUERY) + token * load_i64(arguments, _QUERY_STRIDE) + head * head_size * 4,
            head_size,
            np.float32,
        )
        target = view(scratch + i * padded * 4, head_size, np.float32)
        for d in range(head_size):
            target[d] = source[d] * scale
        running = view(running_at + i * 8, 2, np.float32)
        running[0], running[1] = NEVER, 0.0
        view(totals + i * padded * 4, padded, np.float32)[:] = 0.0
    table = load_i64(arguments, _BLOCK_TABLE) + row * load_i64(arguments, _TABLE_STRIDE)
    first_segment, last_segment = segments_of(computed, tile, count, group, load_i64(arguments, _WINDOW))
    if split > 0:
        first_segment, last_segment = only_segment, only_segment
    for segment in range(first_segment, last_segment + 1):
        segment_of(
            instruction_set,
            dtype,
            lanes,
            size,
            arguments,
            table,
            kv_head,
            variant,
            count,
            computed,
            tile,
            group,
            segment,
            padded,
            scratch,
            scores,
            sums,
            states,
        )
        for i in range(count):
            state = view(states + i * 8, 2, np.float32)
            part = view(sums + i * padded * 4, padded, np.float32)
            if split > 0:
                token, head = first_token + (tile + i) // group, kv_head * group + (tile + i) % group
                at = load_i64(arguments, _PARTIAL) + ((token * heads + head) * split + segment) * (padded + 2) * 4
                kept = view(at, padded + 2, np.float32)
                kept[:2] = state
                kept[2:] = part
            else:
                join(
                    view(running_at + i * 8, 2, np.float32),
                    view(totals + i * padded * 4, padded, np.float32),
                    state[0],
                    state[1],
                    part,
                )
    if split == 0:
        for i in range(count):
            token, head = first_token + (tile + i) // group, kv_head * group + (tile + i) % group
            out = view(
                load_i64(arguments, _OUT) + token * load_i64(arguments, _OUT_STRIDE) + head * head_size * 4,
                head_size,
                np.float32,
            )
            finish(
                view(running_at + i * 8, 2, np.float32),
                view(totals + i * padded * 4, padded, np.float32),
                load_i64(arguments, _SINKS),
                head,
                out,
            )


def make_attend(instruction_set: int, dtype: int) -> Any:
    """The kernel for one KV element type. Units: (row, KV head, tile of queries), and the segment where split."""
    lanes, size = INSTRUCTION_SETS[instruction_set].lanes, ELEMENT_BYTES[KV_DTYPES[dtype]]

    @cfunc(types.void(types.int64, types.int64, types.int64), cache=True)
    def attend(arguments: int, thread: int, threads: int) -> None:
        step = load_i64(arguments, _STEP)
        num_rows, split = load_i64(step, STEP_ROWS), load_i64(step, STEP_SPLIT)
        kv_heads = load_i64(arguments, _KV_HEADS)
        group = load_i64(arguments, _HEADS) // kv_heads
        unit = 0
        for row in range(num_rows):
            at = load_i64(arguments, _ROWS) + row * ROW_FIELDS * 8
            queries, computed = load_i64(at, 1) * group, load_i64(at, 2)
            for kv_head in range(kv_heads):
                for tile in range(0, queries, TILE):
                    first, last = 0, 0
                    if split > 0:
                        first, last = segments_of(
                            computed, tile, min(TILE, queries - tile), group, load_i64(arguments, _WINDOW)
                        )
                    for segment in range(first, last + 1):
                        if unit % threads == thread:
                            unit_of(
                                instruction_set,
                                dtype,
                                lanes,
                                size,
                                arguments,
                                thread,
                                row,
                                kv_head,
                                tile,
                                segment,
                                split,
                            )
                        unit += 1

    return attend


@njit
def segments_of(computed: int, tile: int, count: int, group: int, window: int) -> tuple[int, int]:
    """First and last segment that any query of a tile sees."""
    first = 0
    if window > 0:
        first = max(0, computed + tile // group - window + 1) // SEGMENT
    return first, (computed + (tile + count - 1) // group) // SEGMENT


@cfunc(types.void(types.int64, types.int64, types.int64), cache=True)
def combine(arguments: int, thread: int, threads: int) -> None:
    """After a barrier: join split segments, and quantise the rows of the output."""
    step = load_i64(arguments, _STEP)
    num_rows, split = load_i64(step, STEP_ROWS), load_i64(step, STEP_SPLIT)
    heads, size = load_i64(arguments, _HEADS), load_i64(arguments, _HEAD_SIZE)
    padded = (size + GROUP - 1) // GROUP * GROUP
    width = heads * size
    running, total = np.zeros(2, np.float32), np.zeros(padded, np.float32)
    records = load_i64(arguments, _RECORDS)
    tokens = load_i64(step, STEP_TOKENS)
    start, stop = tokens * thread // threads, tokens * (thread + 1) // threads
    for row in range(num_rows):
        at = load_i64(arguments, _ROWS) + row * ROW_FIELDS * 8
        first_token, num_tokens, computed = load_i64(at, 0), load_i64(at, 1), load_i64(at, 2)
        for token in range(max(start, first_token), min(stop, first_token + num_tokens)):
            out = load_i64(arguments, _OUT) + token * load_i64(arguments, _OUT_STRIDE)
            if split > 0:
                position = computed + token - first_token
                first, last = segments_of(position, 0, 1, 1, load_i64(arguments, _WINDOW))
                for head in range(heads):
                    running[0], running[1] = NEVER, 0.0
                    total[:] = 0.0
                    for segment in range(first, last + 1):
                        kept_at = (
                            load_i64(arguments, _PARTIAL)
                            + ((token * heads + head) * split + segment) * (padded + 2) * 4
                        )
                        kept = view(kept_at, padded + 2, np.float32)
                        join(running, total, kept[0], kept[1], kept[2:])
                    finish(
                        running, total, load_i64(arguments, _SINKS), head, view(out + head * size * 4, size, np.float32)
                    )
            if records != 0:
                groups, lanes = load_i64(arguments, _RECORDS_GROUPS), load_i64(arguments, _RECORDS_WIDTH)
                for group in range((width + GROUP - 1) // GROUP):
                    quantize_group(out + group * GROUP * 4, records + offset_of(token, group, groups, lanes))
