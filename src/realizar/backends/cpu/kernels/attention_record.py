"""The record that an attention kernel reads its arguments from, and the constants that cut a context."""

from __future__ import annotations

from typing import Any

from realizar.backends.cpu.memory import inner, read_i64
from realizar.backends.cpu.records import Record

SEGMENT = 256  # keys whose softmax is computed at once
TILE = 8  # queries at once
BATCH = 32  # tiles of a thread that share a segment's keys and values in float32
ROW_FIELDS = 3  # per row of the step, int64: first token, tokens, tokens computed before

# whole: where not 0, every query of a row sees all keys of the row; there is no window then.
# gate: where not 0, float32 like the output, whose sigmoids multiply it.
# partial: float32 [tokens * heads, max_segments, 2 + padded head size] of maximum, sum, weighted values
ATTEND = Record(
    "step query query_stride num_heads num_kv_heads head_size scale=f32 window soft_cap=f32 sinks cache block_bytes "
    "head_bytes plane_bytes scale_bytes block_size rows block_table table_stride scratch scratch_bytes out out_stride "
    "partial records records_groups records_width gate gate_stride whole"
)

# The step record: split is segments per query, or 0; terms is twice the tokens.
STEP_TOKENS, STEP_SELECTED, STEP_ROWS, STEP_SPLIT, STEP_TERMS = range(5)


@inner
def last_seen(arguments: Any, row: int, query: int) -> int:
    """The last position that a query of a row sees: its own, or where rows are seen whole that of the row's end."""
    rows = arguments.rows + row * ROW_FIELDS * 8
    num_tokens, computed = read_i64(rows, 1), read_i64(rows, 2)
    if arguments.whole != 0:
        return computed + num_tokens - 1
    return computed + query // (arguments.num_heads // arguments.num_kv_heads)


@inner
def segments_of(first: int, last: int, window: int) -> tuple[int, int]:
    """First and last segment that queries see whose last positions are from `first` to `last`."""
    lowest = 0
    if window > 0:
        lowest = max(0, first - window + 1) // SEGMENT
    return lowest, last // SEGMENT
