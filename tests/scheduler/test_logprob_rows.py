"""Log-probabilities of a step's rows, as columns or apart: choices are given the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from realizar.batch import StepOutput
from realizar.kv_cache.manager import KVCacheManager
from realizar.logprob_columns import LogprobColumns, RowColumns
from realizar.outputs import TokenLogprobs
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.scheduler import Scheduler

ROWS, STEPS = 5, 4


def entry(row: int, step: int) -> TokenLogprobs:
    """A row's log-probabilities in a step: three ids are listed."""
    top = tuple((10 * row + place, -0.5 * place) for place in range(3))
    return TokenLogprobs(7, -float(row) - step / 8, 1 + row, top)


def deltas_of(*, as_columns: bool, aborted: Sequence[str]) -> list[list[tuple[int, TokenLogprobs]]]:
    """The log-probabilities of each step's deltas, with the choices' numbers."""
    cache = KVCacheManager(
        (None,), [100], block_size=4, num_rows=ROWS, context_length=40, max_step_tokens=64, prefix_cache=True
    )
    scheduler, found = Scheduler(cache), []
    for row in range(ROWS):
        scheduler.add(Request(str(row), (row, 1, 2), SamplingParams(temperature=0.0, logprobs=3), STEPS + row // 3))
    for step in range(STEPS):
        batch = scheduler.schedule()
        entries = [entry(row, step) for row in range(batch.num_rows)]
        logprobs: Mapping[int, Sequence[TokenLogprobs]] = {row: [each] for row, each in enumerate(entries)}
        if as_columns:
            logprobs = RowColumns(list(range(batch.num_rows)), LogprobColumns.of(entries))
            assert dict(logprobs) == {row: [each] for row, each in enumerate(entries)}
        for name in aborted[step : step + 1]:
            scheduler.abort(name)
        scheduler.update(batch, StepOutput(np.full((batch.num_rows, 1), 7, np.int32), logprobs))
        found.append(
            [
                (number, each)
                for part in scheduler.take_deltas().logprobs
                for number, each in zip(part.number_list(), part.entries, strict=True)
            ]
        )
        scheduler.take_closed_rows()
    return found


def test_columns_give_what_entries_give() -> None:
    """Also those of rows whose requests have ended meanwhile, which nobody gets."""
    for aborted in ((), ("1", "4", "0")):
        columns, apart = (deltas_of(as_columns=as_columns, aborted=aborted) for as_columns in (True, False))
        assert columns == apart
        assert [len(step) for step in columns] == ([5, 5, 5, 5] if not aborted else [4, 3, 2, 2])


def test_rows_that_have_none_are_not_there() -> None:
    columns = RowColumns([4, 2], LogprobColumns.of([entry(4, 0), entry(2, 0)]))
    assert list(columns) == [4, 2]
    assert columns[2] == [entry(2, 0)]
    assert 3 not in columns
