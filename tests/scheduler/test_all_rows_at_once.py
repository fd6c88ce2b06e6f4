"""Decodes that are scheduled and taken in all at once: the same as one row after the other, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from realizar.batch import FROM_PREVIOUS_STEP, RowOutput, ScheduledRow, StepOutput, StepRows
from realizar.kv_cache.manager import KVCacheManager
from realizar.logprob_columns import LogprobColumns
from realizar.outputs import TokenLogprobs
from realizar.sampling_params import SamplingParams
from realizar.scheduler import scheduler as scheduler_module
from realizar.scheduler import steady
from realizar.scheduler.plan import Plan
from realizar.scheduler.row_table import MOST_STOP_IDS, RowTable
from realizar.scheduler.scheduler import Scheduler
from scheduler.random_traffic import Traffic
from scheduler.scheduler_runs import answer, make_scheduler, request


class OneByOne(RowTable):
    """A table that has no plain row: every row is scheduled and taken in by itself."""

    def open(self, row: int, *arguments: Any, **more: Any) -> None:
        super().open(row, *arguments, **more)
        self.is_plain[row] = False


@pytest.mark.parametrize("first", range(0, 36, 6))
def test_the_same_as_row_by_row(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random requests: the same rows, tokens, blocks, outputs and counts after every step."""
    at_once = 0

    def counted(rows: Any, plan: Plan, table: RowTable, cache: KVCacheManager) -> bool:
        nonlocal at_once
        found = steady.schedule_decodes(rows, plan, table, cache)
        at_once += len(plan.decodes)
        return found

    def new_twin(*arguments: Any, **more: Any) -> Scheduler:
        with monkeypatch.context() as patched:
            patched.setattr(scheduler_module, "RowTable", OneByOne)
            return Scheduler(*arguments, **more)

    monkeypatch.setattr(scheduler_module, "schedule_decodes", counted)
    twins = [Traffic(seed, new_twin).run(40) for seed in range(first, first + 6)]
    assert not at_once
    for seed, twin in zip(range(first, first + 6), twins, strict=True):
        assert Traffic(seed).run(40) == twin
    assert at_once > 500


def test_columns_and_rows_say_the_same() -> None:
    rows = (
        ScheduledRow(7, 3, (FROM_PREVIOUS_STEP,), 20, True),
        ScheduledRow(8, 0, (), 9, False),
        ScheduledRow(9, 1, (4, 5, 6), 11, True, num_drafts=2, num_uncertain=3),
        ScheduledRow(10, 2, (1, 2), 0, False, pooling="mean"),
    )
    columns = StepRows.of(rows[:2]).followed_by(StepRows.of(rows[2:]))
    assert columns.rows == rows
    assert columns.query_starts == (0, 1, 1, 4, 6)
    assert columns.num_context_tokens.tolist() == [21, 9, 14, 2]
    assert columns.are_decodes.tolist() == [True, False, True, False]
    unwanted = columns.without_results([1, 2])
    assert [row.sample for row in unwanted.rows] == [True, False, False, False]
    assert unwanted.rows[2] == ScheduledRow(9, 1, (4, 5, 6), 11, False, num_uncertain=3)
    assert unwanted.rows[3] == ScheduledRow(10, 2, (1, 2), 0, False)


def test_results_as_columns_and_by_row() -> None:
    rows = (RowOutput(4, (9,)), RowOutput(2, ()), RowOutput(3, (1, 2)), RowOutput(0, (), pooled=np.ones(2, np.float32)))
    output = StepOutput.of(rows)
    assert output.choices.tolist() == [[9, -1], [-1, -1], [1, 2], [-1, -1]]
    assert output.num_choices.tolist() == [1, 0, 2, 0]
    assert sorted(output.others) == [3]
    assert output.rows == rows
    assert StepOutput.of(rows[:2]).choices.tolist() == [[9], [-1]]


def test_a_row_with_many_stop_ids_is_not_plain() -> None:
    """Ids that no vocabulary has do not count; neither they nor the padding end a row."""
    table, ids = RowTable(3, 10), np.array([1, 2], np.int32)
    for row, count in enumerate((0, MOST_STOP_IDS, MOST_STOP_IDS + 1)):
        stops = frozenset({-1, -7, 2**40, *range(5, 5 + count)})
        table.open(row, row, ids, most_tokens=9, least_tokens=2**60 if row == 0 else 2, stop_ids=stops)
    assert table.is_plain.tolist() == [True, True, False]
    taken = table.take_in(np.array([0, 1]), np.array([5, 5], np.int32))
    assert taken.stopped.tolist() == [False, True]
    assert table.token_ids[:2, :3].tolist() == [[1, 2, 5]] * 2


def test_choices_of_drafts_are_taken_in_up_to_the_end() -> None:
    """Rows that go on, stop at a stop id that comes late enough, and are full; wrong drafts give fewer choices."""
    table, ids = RowTable(4, 12), np.arange(3, dtype=np.int32)
    for row in range(4):
        stops = frozenset({9, -1}) if row else None
        table.open(row, row, ids, most_tokens=5 if row == 3 else 12, least_tokens=4, stop_ids=stops)
    table.num_pending[:] = 1
    choices = np.array([[9, 9, 6], [5, -1, -1], [9, 9, 6], [5, 9, 6]], np.int32)
    taken = table.take_in_several(np.array([2, 1, 3]), choices[[2, 1, 3]])
    assert taken.counts is not None
    assert taken.counts.tolist() == [2, 1, 2]
    assert taken.stopped.tolist() == [True, False, True]
    assert taken.full.tolist() == [False, False, True]
    assert table.num_known.tolist() == [3, 4, 5, 5]
    assert table.token_ids[1:, 3:6].tolist() == [[5, 0, 0], [9, 9, 0], [5, 9, 0]]
    assert table.num_pending.tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("others", [False, True], ids=["alone", "beside a row with its own result"])
def test_log_probabilities_of_a_step_reach_their_rows(others: bool) -> None:
    """Those of some rows come in the columns of the step, whatever else the step has."""
    scheduler = make_scheduler()
    for name, logprobs in (("a", 1), ("b", None), ("c", 1)):
        scheduler.add(replace(request(name, 2), sampling=SamplingParams(logprobs=logprobs)))
    batch = scheduler.schedule()
    answer(scheduler, batch)
    batch = scheduler.schedule()
    columns = LogprobColumns.of([TokenLogprobs(50, -0.5, 1, ((50, -0.5),)), TokenLogprobs(51, -1.5, 2, ((50, -0.5),))])
    first, last = columns.apart()
    alone = {1: RowOutput(int(batch.columns.numbers[1]), (52,))} if others else {}
    output = StepOutput(batch.columns.numbers, np.array([[50], [52], [51]], np.int32), alone, {0: first, 2: last})
    found = {each.request_id: each for each in scheduler.update(batch, output)}
    assert [found[name].token_ids for name in "abc"] == [(50,), (52,), (51,)]
    assert [list(found[name].logprobs) for name in "abc"] == [list(first), [], list(last)]
