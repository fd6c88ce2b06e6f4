"""A scheduled batch as the arrays that a backend reads."""

from __future__ import annotations

import numpy as np

from realizar.backends.base import ForwardInput, RowInput
from realizar.batch import ScheduledBatch
from realizar.kv_cache.manager import KVCacheManager


def build_forward_input(batch: ScheduledBatch, cache: KVCacheManager) -> ForwardInput:
    """Arrays of one step, copied: the cache may go on changing while the step runs."""
    rows: list[RowInput] = []
    token_ids: list[int] = []
    for scheduled in batch.rows:
        rows.append(
            RowInput(
                row=scheduled.row,
                query_start=len(token_ids),
                num_tokens=scheduled.num_scheduled_tokens,
                num_computed_tokens=scheduled.num_computed_tokens,
                sample=scheduled.sample,
                logprob_queries=scheduled.logprob_queries,
                draft_ids=scheduled.draft_ids,
                pooling=scheduled.pooling,
            )
        )
        token_ids.extend(scheduled.token_ids)
    numbers = np.array([row.row for row in rows], np.int32)
    counts = np.array([row.num_tokens for row in rows], np.int32)
    starts = np.array([row.query_start for row in rows], np.int32)
    computed = np.array([row.num_computed_tokens for row in rows], np.int32)
    positions = np.arange(len(token_ids), dtype=np.int32) + np.repeat(computed - starts, counts)
    return ForwardInput(
        token_ids=np.array(token_ids, np.int32),
        positions=positions,
        slot_mapping=cache.slot_mapping(np.repeat(numbers, counts), positions),
        block_tables=cache.block_tables(numbers, int((computed + counts).max())),
        rows=tuple(rows),
    )
