"""Decodes of a step, all at once: the case of nearly every row of nearly every step.

A decode that is like the one before it takes its token from the same place and writes into a block that its row has.
Rows of which more is wanted, or that lack a block when none is free, are scheduled one by one by the scheduler.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from realizar.kv_cache.manager import KVCacheManager
from realizar.scheduler.plan import Plan
from realizar.scheduler.row_table import RowTable


def schedule_decodes(rows: NDArray[np.intp], plan: Plan, table: RowTable, cache: KVCacheManager) -> bool:
    """Schedule one token for each row, as far as the plan has room, and take the blocks that they need.

    Args:
        rows: intp [decodes], running rows with one token to compute, in their order.

    Returns:
        False if the rows must be scheduled one by one: one has drafts or wants more than a choice, or a block is
        missing. Blocks that were taken by then are the same that scheduling one by one would take.
    """
    if len(rows) > plan.most_decodes:
        rows = rows[: plan.most_decodes]
    if not table.have_one_result(rows):
        return False
    computed = table.num_computed[rows]
    for index in (cache.num_steady(rows, computed) <= 0).nonzero()[0].tolist():
        if not cache.allocate(int(rows[index]), int(computed[index]), 1):
            return False
    plan.add_decodes(rows)
    return True
