"""A scheduled batch as the arrays that a backend reads."""

from __future__ import annotations

import numpy as np

from realizar.backends.base import ForwardInput
from realizar.batch import ScheduledBatch
from realizar.kv_cache.manager import KVCacheManager


def build_forward_input(batch: ScheduledBatch, cache: KVCacheManager) -> ForwardInput:
    """Arrays of one step, copied: the cache may go on changing while the step runs."""
    rows = batch.rows
    token_ids: list[int] = []
    starts = [0]
    for row in rows:
        token_ids.extend(row.token_ids)
        starts.append(len(token_ids))
    numbers = np.array([row.row for row in rows], np.int32)
    computed = np.array([row.num_computed_tokens for row in rows], np.int32)
    firsts = np.array(starts, np.int32)
    counts = np.diff(firsts)
    positions = np.arange(len(token_ids), dtype=np.int32) + np.repeat(computed - firsts[:-1], counts)
    return ForwardInput(
        token_ids=np.array(token_ids, np.int32),
        positions=positions,
        slot_mapping=cache.slot_mapping(np.repeat(numbers, counts), positions),
        block_tables=cache.block_tables(numbers, int((computed + counts).max())),
        rows=rows,
        query_starts=tuple(starts),
    )
