"""A scheduled batch as the arrays that a backend reads."""

from __future__ import annotations

import numpy as np

from realizar.backends.base import ForwardInput
from realizar.batch import ScheduledBatch
from realizar.kv_cache.manager import KVCacheManager


def build_forward_input(batch: ScheduledBatch, cache: KVCacheManager) -> ForwardInput:
    """Arrays of one step, copied: the cache may go on changing while the step runs."""
    columns = batch.columns
    rows, positions = columns.numbers, columns.num_computed_tokens
    if not columns.only_decodes:
        rows = np.repeat(columns.numbers, columns.num_tokens)
        firsts = columns.num_computed_tokens - columns.starts[:-1]
        positions = np.arange(len(columns.token_ids), dtype=np.int32) + np.repeat(firsts, columns.num_tokens)
    return ForwardInput(
        columns=columns,
        positions=positions,
        slot_mapping=cache.slot_mapping(rows, positions),
        block_tables=cache.block_tables(columns.numbers, int(columns.num_context_tokens.max())),
        state_moves=batch.state_moves,
    )
