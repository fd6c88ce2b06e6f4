"""Tokens of a step that may be undone, which a model with a state has to know, and where such a model starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from realizar.sampling_params import StructuredOutput
from realizar.scheduler.scheduler import Scheduler
from scheduler.scheduler_runs import answer, make_scheduler, request
from step_inputs import rows_of

REGEX = StructuredOutput("regex", "[a-z]+")


def add(scheduler: Scheduler, name: str, prompt: tuple[int, ...], structured: StructuredOutput | None) -> None:
    asked = request(name, prompt)
    scheduler.add(replace(asked, sampling=replace(asked.sampling, structured=structured)))


@pytest.mark.parametrize("has_state", [True, False])
def test_drafts_and_the_token_before_a_sampled_one_that_a_grammar_may_hold(has_state: bool) -> None:
    """In chunks of a prompt, decodes with drafts, decodes of all rows at once, and a decode beside a prompt."""
    scheduler = make_scheduler(drafts=2, has_state=has_state, max_step_tokens=14)
    add(scheduler, "free", (5, 6, 7, 8, 5), None)
    add(scheduler, "deferred", (5, 6, 7, 8, 5), REGEX)
    deferred = int(has_state)
    batch = scheduler.schedule()
    assert [(row.num_tokens, row.num_uncertain) for row in rows_of(batch)] == [(5, 0), (5, deferred)]
    answer(scheduler, batch, 6)
    batch = scheduler.schedule()
    assert [(row.num_tokens, row.num_uncertain) for row in rows_of(batch)] == [(3, 2), (3, 2 + deferred)]
    answer(scheduler, batch, 50)
    batch = scheduler.schedule()
    assert batch.columns.only_decodes
    assert [(row.num_tokens, row.num_uncertain) for row in rows_of(batch)] == [(1, 0), (1, deferred)]
    answer(scheduler, batch, 51)
    add(scheduler, "long", tuple(range(60, 80)), REGEX)
    batch = scheduler.schedule()
    assert [row.num_uncertain for row in rows_of(batch)] == [0, deferred, 0]
    assert rows_of(batch)[2].num_tokens < 20


def test_a_model_with_a_state_starts_from_no_cached_blocks_and_waits_for_none() -> None:
    shared = tuple(range(1, 9))
    for has_state, wanted in ((False, [(0, 0, 8), (1, 6, 2)]), (True, [(0, 0, 8), (1, 0, 8)])):
        scheduler = make_scheduler(has_state=has_state, max_step_tokens=20)
        found = []
        for name in "ab":
            scheduler.add(request(name, shared, max_tokens=1, salt=None))
            batch = scheduler.schedule()
            found += [(len(found), row.num_computed_tokens, row.num_tokens) for row in rows_of(batch)]
            answer(scheduler, batch)
        assert found == wanted
