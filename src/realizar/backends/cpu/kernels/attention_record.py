"""The record that an attention kernel reads its arguments from, and the constants that cut a context."""

from __future__ import annotations

from typing import Any

import numpy as np

from realizar.backends.cpu.memory import inner, read_i64, view
from realizar.backends.cpu.records import Record

SEGMENT = 256  # keys whose softmax is computed at once
TILE = 8  # queries at once
BATCH = 32  # tiles of a thread that share a segment's keys and values in float32
ROW_FIELDS = 3  # per row of the step, int64: first token, tokens, tokens computed before

# whole: where not 0, every query of a row sees all keys of the row; there is no window then.
# seen: where not 0, int32 [tokens], the last position that each token of the step sees.
# gate: where not 0, float32 like the output, whose sigmoids multiply it.
# partial: float32 [tokens * heads, max_segments, 2 + padded head size] of maximum, sum, weighted values
ATTEND = Record(
    "step query query_stride num_heads num_kv_heads head_size scale=f32 window soft_cap=f32 sinks cache block_bytes "
    "head_bytes plane_bytes scale_bytes key_scale=f32 value_scale=f32 block_size rows block_table table_stride scratch "
    "scratch_bytes out out_stride partial records records_groups records_width gate gate_stride whole seen"
)

# The step record: split is segments per query, or 0; terms is twice the tokens.
STEP_TOKENS, STEP_SELECTED, STEP_ROWS, STEP_SPLIT, STEP_TERMS = range(5)


@inner
def last_seen(arguments: Any, row: int, query: int) -> int:
    """The last position that a query of a row sees: its own, that of the image's end, or that of the row's end."""
    rows = arguments.rows + row * ROW_FIELDS * 8
    first_token, num_tokens, computed = read_i64(rows, 0), read_i64(rows, 1), read_i64(rows, 2)
    if arguments.whole != 0:
        return computed + num_tokens - 1
    token = query // (arguments.num_heads // arguments.num_kv_heads)
    if arguments.seen != 0:
        at = first_token + token
        return np.int64(view(arguments.seen, at + 1, np.int32)[at])
    return computed + token


@inner
def first_seen(arguments: Any, row: int, query: int) -> int:
    """The first position that a query of a row sees: its window reaches back from its own."""
    if arguments.window <= 0:
        return 0
    computed = read_i64(arguments.rows + row * ROW_FIELDS * 8, 2)
    token = query // (arguments.num_heads // arguments.num_kv_heads)
    return max(0, computed + token - arguments.window + 1)


@inner
def segments_of(arguments: Any, row: int, first: int, last: int) -> tuple[int, int]:
    """First and last segment that queries of a row see, from `first` to `last`."""
    return first_seen(arguments, row, first) // SEGMENT, last_seen(arguments, row, last) // SEGMENT
