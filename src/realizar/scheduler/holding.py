"""`Holding`: rows of a submitted step whose masks are late make no choice in it, and try again in the next.

A row that is held computes its last token once more: the same keys and values at the same place, so that nothing else
is undone. A row keeps the blocks that this token sees (`kv_cache/group.py`), also where the next one leaves some out of
its window. Without it a step would wait for its slowest grammar.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from realizar.batch import ScheduledBatch
from realizar.scheduler.open_sequences import OpenSequences
from realizar.scheduler.row_table import RowTable


class Holding:
    """Part of a scheduler."""

    def __init__(self, open_sequences: OpenSequences, table: RowTable) -> None:
        self._open, self._table = open_sequences, table

    def hold(self, step: ScheduledBatch, rows: Collection[int], following: ScheduledBatch) -> ScheduledBatch:
        """Let rows of the oldest submitted step go without a choice.

        Args:
            rows: their numbers. Those whose sequences have ended pass.
            following: the step that was scheduled after it and not submitted yet; it may have no rows.

        Returns:
            The following step, in which these rows compute their last token again, in place of a choice that they have
            not made.
        """
        table, columns = self._table, step.columns
        are_held = np.zeros(len(table.sequence_ids), np.bool_)
        are_held[list(rows)] = True
        held = are_held[columns.numbers] & (table.sequence_ids[columns.numbers] == columns.sequence_ids)
        numbers = columns.numbers[held]
        running = np.array([self._is_running(row) for row in numbers.tolist()], np.bool_)
        table.num_pending[numbers] -= 1
        table.num_drafts[numbers] = 0
        table.num_computed[numbers[running]] -= 1 + columns.num_drafts[held][running]
        are_held[:] = False
        are_held[numbers[running]] = True
        again = are_held[following.columns.numbers]
        if not again.any():
            return following
        return replace(following, columns=table.computed_again(following.columns, again))

    def _is_running(self, row: int) -> bool:
        """False if the sequence was preempted, and starts again anyway."""
        sequence = self._open.in_rows[row]
        return sequence is not None and sequence.running
