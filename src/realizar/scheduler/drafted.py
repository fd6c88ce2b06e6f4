"""Decodes with drafts, all at once: their columns, where the scheduler has decided on each row's share of a step."""

from __future__ import annotations

import numpy as np

from realizar.batch import StepRows
from realizar.kv_cache.manager import KVCacheManager
from realizar.scheduler.plan import Plan
from realizar.scheduler.row_table import RowTable
from realizar.scheduler.sequence import Sequence


def advance_decodes(plan: Plan, table: RowTable, cache: KVCacheManager) -> tuple[StepRows, list[Sequence]]:
    """Advance a plan's decodes; from now on their tokens count as computed.

    In a step with drafts its decodes are planned one by one. Those of plain rows that stand before all other rows are
    advanced here, the remaining rows by themselves.

    Returns:
        The columns of the decodes, and the sequences that follow them in the step.
    """
    decodes, sequences = table.advance(plan.decodes), list(plan.tokens)
    if not plan.drafts:
        return decodes, sequences
    rows = np.array([sequence.own_row for sequence in sequences], np.intp)
    counts = np.array(list(plan.tokens.values()), np.int32)
    drafts = [plan.drafts.get(sequence, ()) for sequence in sequences]
    num_drafts = np.array([len(each) for each in drafts], np.int32)
    are_decodes = table.is_plain[rows] & (counts - num_drafts == 1) & (table.num_remaining(rows) == 1)
    others = (~are_decodes).nonzero()[0]
    end = int(others[0]) if len(others) else len(sequences)
    if not end:
        return decodes, sequences
    rows, first = rows[:end], sequences[:end]
    drafted = table.advance_with_drafts(rows, drafts[:end], num_drafts[:end])
    for sequence in first:
        if sequence.drafts:
            sequence.drafts = ()
    if cache.prefix_cache:  # a row without drafts is looked at when the choice after its token is known
        full = cache.have_new_blocks(rows, table.num_known[rows], table.num_computed[rows])
        for index in (full & (drafted.num_drafts > 0)).nonzero()[0].tolist():
            sequence = first[index]
            cache.register(sequence.own_row, sequence.keys, sequence.token_ids, sequence.num_computed_tokens)
    return (decodes.followed_by(drafted) if len(decodes) else drafted), sequences[end:]
