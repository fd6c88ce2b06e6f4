"""Sequences that share a prefix start from each other's blocks; others must not."""

from __future__ import annotations

import pytest

from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.scheduler import Scheduler
from scheduler.scheduler_runs import answer, make_scheduler, request, shape, step
from step_inputs import rows_of


def used(scheduler: Scheduler) -> int:
    """Blocks in use."""
    return scheduler._cache.counts[0].used


def shared(name: str, prompt: int | tuple[int, ...], max_tokens: int = 20, n: int = 1) -> Request:
    return request(name, prompt, max_tokens, n, salt=None)


def test_the_same_prompt_is_not_computed_again() -> None:
    scheduler = make_scheduler()
    scheduler.add(shared("a", 9))
    assert step(scheduler) == [(0, 0, 9, True)]
    scheduler.add(shared("b", 9))
    assert step(scheduler) == [(0, 9, 1, True), (1, 8, 1, True)]
    assert used(scheduler) == 4 + 2
    assert (scheduler.counts.prefix_cache_queries, scheduler.counts.prefix_cache_hits) == (18, 8)


@pytest.mark.parametrize(("prompt", "cached"), [(1, 0), (2, 0), (3, 2), (4, 2), (8, 6), (9, 8)])
def test_a_hit_leaves_a_token_to_compute(prompt: int, cached: int) -> None:
    scheduler = make_scheduler()
    scheduler.add(shared("a", 9, max_tokens=1))
    step(scheduler)
    scheduler.add(shared("b", prompt))
    batch = scheduler.schedule()
    (output,) = answer(scheduler, batch)
    assert shape(batch) == [(0, cached, prompt - cached, True)]
    assert output.num_cached_tokens == cached


def test_a_prompt_that_differs_early_shares_nothing_after_that() -> None:
    scheduler = make_scheduler()
    scheduler.add(shared("a", (1, 2, 3, 4, 5, 6, 7), max_tokens=1))
    step(scheduler)
    scheduler.add(shared("b", (1, 2, 9, 4, 5, 6, 7)))
    assert step(scheduler) == [(0, 2, 5, True)]


def test_salts_share_nothing() -> None:
    scheduler = make_scheduler()
    for name, salt in (("a", "x"), ("b", "y"), ("c", None)):
        scheduler.add(request(name, 7, max_tokens=1, salt=salt))
        assert step(scheduler) == [(0, 0, 7, True)]
    scheduler.add(request("d", 7, max_tokens=1, salt="y"))
    assert step(scheduler) == [(0, 6, 1, True)]


def test_choices_share_the_prompt_and_compute_it_once() -> None:
    scheduler = make_scheduler(max_step_tokens=30)
    scheduler.add(shared("a", 9, n=3))
    assert step(scheduler) == [(0, 0, 9, True)]
    assert step(scheduler) == [(0, 9, 1, True), (1, 8, 1, True), (2, 8, 1, True)]
    assert used(scheduler) == 4 + 3
    scheduler.abort("a", 0)
    scheduler.audit()
    assert used(scheduler) == 4 + 2
    scheduler.abort("a")
    assert used(scheduler) == 0


def test_prompts_that_arrive_together_and_begin_alike_compute_the_beginning_once() -> None:
    """The second waits for the first to compute what both need; the third, which does not, goes on."""
    scheduler = make_scheduler(max_step_tokens=8)
    scheduler.add(shared("a", (*range(10), 50)))
    scheduler.add(shared("b", (*range(10), 60, 61)))
    scheduler.add(shared("c", (80, 81, 82)))
    assert step(scheduler) == [(0, 0, 5, False), (1, 0, 3, True)]
    assert step(scheduler) == [(1, 3, 1, True), (0, 5, 6, True)]
    assert step(scheduler) == [(0, 11, 1, True), (1, 4, 1, True), (2, 10, 2, True)]


def test_a_waiting_request_goes_on_when_the_other_is_aborted() -> None:
    scheduler = make_scheduler(max_step_tokens=4)
    scheduler.add(shared("a", 9))
    scheduler.add(shared("b", 9))
    assert step(scheduler) == [(0, 0, 4, False)]
    scheduler.abort("a")
    assert step(scheduler)[0][1:] == (4, 4, False)


def test_a_conversation_goes_on_from_its_answer() -> None:
    """Five tokens of prompt and six of answer; the last is never computed."""
    scheduler = make_scheduler()
    scheduler.add(shared("a", 5, max_tokens=6))
    while scheduler.has_work:
        step(scheduler)
    answered = (1, 2, 3, 4, 5, *[50] * 6)
    scheduler.add(shared("b", (*answered, 7, 8, 9)))
    assert step(scheduler) == [(0, 10, 4, True)]


def test_what_was_left_longest_ago_goes_first() -> None:
    """Ten blocks: the third prompt takes two of the first's, from its tail, and the first hit one more."""
    scheduler = make_scheduler(num_blocks=10)
    for name, first in (("a", 10), ("b", 20), ("c", 30)):
        scheduler.add(shared(name, tuple(range(first, first + 8)), max_tokens=1))
        step(scheduler)
    for first, cached in ((30, 6), (20, 6), (10, 2)):
        scheduler.add(shared("again", tuple(range(first, first + 8)), max_tokens=1))
        assert step(scheduler) == [(0, cached, 8 - cached, True)]


def test_a_window_needs_only_what_the_next_token_sees() -> None:
    """A window of 4 in blocks of 2: the token at position 10 sees 7 to 10, so blocks 3 and 4 of the five before it."""
    scheduler = make_scheduler(windows=(4,), num_blocks=5)
    scheduler.add(shared("a", 11, max_tokens=1))
    for _ in range(3):
        step(scheduler)
    assert not scheduler.has_work
    scheduler.add(shared("b", 11, max_tokens=1))
    assert step(scheduler) == [(0, 10, 1, True)]


def test_means_and_scores_compute_every_token_they_need() -> None:
    scheduler = make_scheduler()
    scheduler.add(shared("a", 9, max_tokens=1))
    step(scheduler)
    ids = tuple(range(1, 10))
    scheduler.add(Request("mean", ids, SamplingParams(), 0, pooling="mean"))
    assert step(scheduler) == [(0, 0, 9, False)]
    scheduler.add(Request("last", ids, SamplingParams(), 0, pooling="last"))
    assert step(scheduler) == [(0, 8, 1, False)]
    scheduler.add(Request("scored", ids, SamplingParams(prompt_logprobs=0, n=2), 3))
    batch = scheduler.schedule()
    assert [(row.num_computed_tokens, len(row.logprob_queries)) for row in rows_of(batch)] == [(0, 8), (8, 0)]


def test_pooling_is_asked_of_the_last_tokens_and_for_a_mean_of_all() -> None:
    for pooling, wanted in (("last", [None, None, "last"]), ("mean", ["mean"] * 3)):
        scheduler = make_scheduler(max_step_tokens=4)
        scheduler.add(Request("a", tuple(range(9)), SamplingParams(), 0, pooling=pooling))  # type: ignore[arg-type]
        asked = []
        while scheduler.has_work:
            batch = scheduler.schedule()
            asked.append(rows_of(batch)[0].pooling)
            answer(scheduler, batch)
        assert asked == wanted
