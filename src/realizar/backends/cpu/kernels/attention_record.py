"""The record that an attention kernel reads its arguments from, and the constants that cut a context."""

from __future__ import annotations

from realizar.backends.cpu.memory import inner
from realizar.backends.cpu.records import Record

SEGMENT = 256  # keys whose softmax is computed at once
TILE = 8  # queries at once
BATCH = 32  # tiles of a thread that share a segment's keys and values in float32
ROW_FIELDS = 3  # per row of the step, int64: first token, tokens, tokens computed before

# gate: where not 0, float32 like the output, whose sigmoids multiply it.
# partial: float32 [tokens * heads, max_segments, 2 + padded head size] of maximum, sum, weighted values
ATTEND = Record(
    "step query query_stride num_heads num_kv_heads head_size scale=f32 window soft_cap=f32 sinks cache block_bytes "
    "head_bytes plane_bytes scale_bytes block_size rows block_table table_stride scratch scratch_bytes out out_stride "
    "partial records records_groups records_width gate gate_stride"
)

# The step record: split is segments per query, or 0; terms is twice the tokens.
STEP_TOKENS, STEP_SELECTED, STEP_ROWS, STEP_SPLIT, STEP_TERMS = range(5)


@inner
def segments_of(computed: int, tile: int, count: int, group: int, window: int) -> tuple[int, int]:
    """First and last segment that any query of a tile sees."""
    first = 0
    if window > 0:
        first = max(0, computed + tile // group - window + 1) // SEGMENT
    return first, (computed + (tile + count - 1) // group) // SEGMENT
