"""The columns of rows: what they say of each row, how tokens are appended to them, and how outputs come of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from realizar.batch import FROM_PREVIOUS_STEP, StepOutput
from realizar.logprob_columns import LogprobColumns
from realizar.outputs import TokenLogprobs
from realizar.sampling_params import SamplingParams
from realizar.scheduler.row_table import RowTable
from realizar.stop_rule import FEW_STOP_IDS
from scheduler.random_traffic import Traffic
from scheduler.scheduler_runs import answer, make_scheduler, request
from step_inputs import RowOutput, ScheduledRow, results_of, rows_of, step_output, step_rows, updated


@pytest.mark.parametrize("first", range(0, 24, 6))
def test_random_requests_go_by_the_rules(first: int) -> None:
    """Rows name the tokens of their sequences, and outputs are what rows sampled up to the first that ends them."""
    num_outputs = 0
    for seed in range(first, first + 6):
        traffic = Traffic(seed)
        traffic.run(40)
        num_outputs += traffic.num_outputs
    assert num_outputs > 500


def test_columns_and_rows_say_the_same() -> None:
    rows = (
        ScheduledRow(7, 3, (FROM_PREVIOUS_STEP,), 20, True),
        ScheduledRow(8, 0, (), 9, False),
        ScheduledRow(9, 1, (4, 5, 6), 11, True, num_drafts=2, num_uncertain=3),
        ScheduledRow(10, 2, (1, 2), 0, False, pooling="mean"),
    )
    assert step_rows(rows).lookahead is None
    rows = (rows[0], rows[1], replace(rows[2], lookahead=2), rows[3])
    given = (5, np.ones((1, 3), np.float32))
    columns = replace(step_rows(rows), embeddings=(given,))
    assert rows_of(columns) == rows
    assert columns.starts.tolist() == [0, 1, 1, 4, 6]
    assert columns.num_context_tokens.tolist() == [21, 9, 14, 2]
    assert columns.most_context_tokens == 21
    assert columns.are_decodes.tolist() == [True, False, True, False]
    unwanted = columns.without_results([1, 2])
    assert [row.sample for row in rows_of(unwanted)] == [True, False, False, False]
    assert rows_of(unwanted)[2] == ScheduledRow(9, 1, (4, 5, 6), 11, False, num_uncertain=3, lookahead=2)
    assert rows_of(unwanted)[3] == ScheduledRow(10, 2, (1, 2), 0, False)
    assert unwanted.embeddings == (given,)


def test_results_as_columns_and_by_row() -> None:
    rows = (RowOutput((9,)), RowOutput(()), RowOutput((1, 2)), RowOutput((), pooled=np.ones(2, np.float32)))
    output = step_output(rows)
    assert output.sampled.tolist() == [[9, -1], [-1, -1], [1, 2], [-1, -1]]
    assert output.num_sampled.tolist() == [1, 0, 2, 0]
    assert sorted(output.pooled) == [3]
    assert results_of(output) == rows
    assert step_output(rows[:2]).sampled.tolist() == [[9], [-1]]


def test_any_number_of_stop_ids() -> None:
    """Ids that no vocabulary has do not count; neither they nor the padding end a row."""
    table, ids = RowTable(4, 10), np.array([1, 2], np.int32)
    for row, count in enumerate((0, FEW_STOP_IDS, FEW_STOP_IDS + 1, 40)):
        stops = {-1, -7, 2**40, *range(5, 5 + count)}
        sampling = SamplingParams(stop_token_ids=tuple(stops), min_tokens=2**53 if row == 3 else 0)
        table.open(row, row, ids, replace(request("", 2, max_tokens=7), sampling=sampling))
    for token_id, stopped in ((5, [False, True, True, False]), (21, [False, False, True, False])):
        _, found, _ = table.append_tokens(np.arange(4), np.full((4, 1), token_id, np.int32))
        assert found.tolist() == stopped
    assert table.token_ids[:, :4].tolist() == [[1, 2, 5, 21]] * 4
    table.close(2)
    assert not table.append_tokens(np.array([0, 2]), np.full((2, 1), 5, np.int32))[1].any()


def test_tokens_after_drafts_are_appended_up_to_the_end() -> None:
    """Rows that go on, stop at a stop id that comes late enough, and are full; wrong drafts give fewer tokens."""
    table, ids = RowTable(4, 12), np.arange(3, dtype=np.int32)
    for row in range(4):
        sampling = SamplingParams(stop_token_ids=(9, -1) if row else (), min_tokens=1)
        table.open(row, row, ids, replace(request("", 3, max_tokens=2 if row == 3 else 9), sampling=sampling))
    table.num_pending[:] = 1
    sampled = np.array([[9, 9, 6], [5, -1, -1], [9, 9, 6], [5, 9, 6]], np.int32)
    counts, stopped, full = table.append_tokens(np.array([2, 1, 3]), sampled[[2, 1, 3]])
    assert counts.tolist() == [2, 1, 2]
    assert stopped.tolist() == [True, False, True]
    assert full.tolist() == [False, False, True]
    assert table.num_known.tolist() == [3, 4, 5, 5]
    assert table.token_ids[1:, 3:6].tolist() == [[5, 0, 0], [9, 9, 0], [5, 9, 0]]
    assert table.num_pending.tolist() == [1, 0, 0, 0]


def test_log_probabilities_of_a_step_reach_their_rows() -> None:
    """Those of some rows come in the columns of the step, whatever else the step has."""
    scheduler = make_scheduler()
    for name, logprobs in (("a", 1), ("b", None), ("c", 1)):
        scheduler.add(replace(request(name, 2), sampling=SamplingParams(logprobs=logprobs)))
    batch = scheduler.schedule()
    answer(scheduler, batch)
    batch = scheduler.schedule()
    columns = LogprobColumns.of([TokenLogprobs(50, -0.5, 1, ((50, -0.5),)), TokenLogprobs(51, -1.5, 2, ((50, -0.5),))])
    first, last = columns.apart()
    output = StepOutput(np.array([[50], [52], [51]], np.int32), {0: first, 2: last})
    found = {each.request_id: each for each in updated(scheduler, batch, output)}
    assert [found[name].token_ids for name in "abc"] == [(50,), (52,), (51,)]
    assert [list(found[name].logprobs) for name in "abc"] == [list(first), [], list(last)]
