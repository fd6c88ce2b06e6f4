"""The sequences of a step, their order, and preemption."""

from __future__ import annotations

from realizar.batch import FROM_PREVIOUS_STEP
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Policy
from realizar.scheduler.scheduler import SchedulerCounts
from scheduler.scheduler_runs import answer, make_scheduler, request, shape, step
from step_inputs import RowOutput, rows_of, step_output, updated


def test_decodes_come_first_then_chunks_then_those_that_wait() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 4))
    assert step(scheduler) == [(0, 0, 4, True)]
    scheduler.add(request("b", 14))
    scheduler.add(request("c", 3))
    assert step(scheduler) == [(0, 4, 1, True), (1, 0, 6, False), (2, 0, 3, True)]
    assert step(scheduler) == [(0, 5, 1, True), (2, 3, 1, True), (1, 6, 8, True)]
    assert step(scheduler) == [(0, 6, 1, True), (1, 14, 1, True), (2, 4, 1, True)]
    assert scheduler.counts == SchedulerCounts(num_running=3, num_waiting=0, num_preemptions=0, prefix_cache_queries=21)


def test_prefill_first_holds_decodes_back() -> None:
    scheduler = make_scheduler(policy=Policy("prefill"))
    scheduler.add(request("a", 4))
    step(scheduler)
    scheduler.add(request("b", 14))
    assert step(scheduler) == [(1, 0, 10, False)]
    assert step(scheduler) == [(1, 10, 4, True)]
    assert step(scheduler) == [(0, 4, 1, True), (1, 14, 1, True)]


def test_nobody_overtakes_in_the_queue() -> None:
    """A prompt that does not fit now keeps its place before one that would."""
    scheduler = make_scheduler(num_blocks=12)
    scheduler.add(request("a", 8, max_tokens=4))
    scheduler.add(request("b", 18, max_tokens=2))
    scheduler.add(request("c", 2, max_tokens=2))
    for _ in range(4):
        assert [row[0] for row in step(scheduler)] == [0]
    assert step(scheduler) == [(0, 0, 8, False), (1, 0, 2, True)]


def test_a_short_prompt_does_not_wait_until_a_long_one_is_read() -> None:
    """Half of a step for the long one, half of the rest for the next, and what is left for what it completes."""
    scheduler = make_scheduler(max_step_tokens=40)
    scheduler.add(request("a", 90, max_tokens=2))
    assert step(scheduler) == [(0, 0, 40, False)]
    scheduler.add(request("b", 12, max_tokens=2))
    scheduler.add(request("c", 4, max_tokens=2))
    assert step(scheduler) == [(0, 40, 24, False), (1, 0, 12, True), (2, 0, 4, True)]
    assert step(scheduler) == [(1, 12, 1, True), (2, 4, 1, True), (0, 64, 26, True)]


def test_max_running_bounds_the_rows() -> None:
    scheduler = make_scheduler(max_running=2)
    for name in "abc":
        scheduler.add(request(name, 1, max_tokens=2))
    assert [row[0] for row in step(scheduler)] == [0, 1]
    assert [row[0] for row in step(scheduler)] == [0, 1]
    assert [row[1:] for row in step(scheduler)] == [(0, 1, True)]


def test_choices_are_rows_of_their_own() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 2, n=3))
    batch = scheduler.schedule()
    assert [(opened.row, opened.choice, opened.history, opened.num_prompt_tokens) for opened in batch.opened] == [
        (0, 0, (1, 2), 2),
        (1, 1, (1, 2), 2),
        (2, 2, (1, 2), 2),
    ]


def test_a_step_ahead_takes_the_token_from_the_step_before() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 3, max_tokens=3))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert [row.token_ids for row in rows_of(second)] == [(FROM_PREVIOUS_STEP,)]
    assert second.opened == ()
    answer(scheduler, first, 40)
    third = scheduler.schedule()
    assert [row.token_ids for row in rows_of(third)] == [(FROM_PREVIOUS_STEP,)]
    answer(scheduler, second, 41)
    assert rows_of(scheduler.schedule()) == ()  # the third token is the last, and on its way
    (last,) = answer(scheduler, third, 42)
    assert last.finish_reason == "length"
    assert not scheduler.has_work


def test_a_step_ahead_of_a_stop_is_dropped_and_its_row_stays_taken() -> None:
    scheduler = make_scheduler(max_running=1)
    scheduler.add(request("a", 3, stop=(40,)))
    scheduler.add(request("b", 2))
    first, second = scheduler.schedule(), scheduler.schedule()
    (output,) = answer(scheduler, first, 40)
    assert (output.finish_reason, output.stop_token_id, output.token_ids) == ("stop", 40, (40,))
    assert scheduler.take_closed_rows() == []
    assert rows_of(scheduler.schedule()) == ()
    assert answer(scheduler, second, 41) == []
    assert scheduler.take_closed_rows() == [0]
    assert [opened.history for opened in scheduler.schedule().opened] == [(1, 2)]


def test_the_last_to_come_is_preempted_and_keeps_its_row() -> None:
    """Two growing rows meet a pool of 8 blocks: the later gives way, and goes on, in its row, when alone.

    The other took one of its three blocks; what it had in the first two is still there.
    """
    scheduler = make_scheduler(num_blocks=8)
    scheduler.add(request("a", 6, max_tokens=6))
    scheduler.add(request("b", 4, max_tokens=6))
    steps = []
    while scheduler.has_work:
        batch = scheduler.schedule()
        steps.append(shape(batch))
        assert bool(batch.opened) is (len(steps) == 1)
        answer(scheduler, batch)
        scheduler.audit()
    assert steps == [
        [(0, 0, 6, True), (1, 0, 4, True)],
        [(0, 6, 1, True), (1, 4, 1, True)],
        [(0, 7, 1, True), (1, 5, 1, True)],
        [(0, 8, 1, True)],
        [(0, 9, 1, True)],
        [(0, 10, 1, True)],
        [(1, 4, 3, True)],
        [(1, 7, 1, True)],
        [(1, 8, 1, True)],
    ]
    assert scheduler.counts.num_preemptions == 1


def test_a_preempted_sequence_waits_for_its_token_before_it_starts_again() -> None:
    """Blocks come free while the step that samples it is still on its way: only then may it be computed again."""
    scheduler = make_scheduler(num_blocks=6)
    scheduler.add(request("a", 4, max_tokens=6))
    scheduler.add(request("b", 4, max_tokens=6))
    first = scheduler.schedule()
    answer(scheduler, first)
    second = scheduler.schedule()  # each takes its third block
    answer(scheduler, second)
    third = scheduler.schedule()
    assert shape(third) == [(0, 5, 1, True), (1, 5, 1, True)]
    fourth = scheduler.schedule()  # no fourth block for the first: the second gives way
    assert shape(fourth) == [(0, 6, 1, True)]
    scheduler.abort("a")
    assert rows_of(scheduler.schedule()) == ()
    answer(scheduler, third)
    assert shape(scheduler.schedule()) == [(1, 4, 3, True)]


def test_a_stop_token_counts_only_after_min_tokens() -> None:
    scheduler = make_scheduler()
    sampling = SamplingParams(min_tokens=2, stop_token_ids=(9,))
    scheduler.add(Request("a", (1, 2), sampling, max_tokens=20))
    outputs = [output for _ in range(3) for output in answer(scheduler, scheduler.schedule(), 9)]
    assert [output.finish_reason for output in outputs] == [None, None, "stop"]


def test_times_are_those_of_the_clock() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 3, max_tokens=2))
    batch = scheduler.schedule()
    (first,) = answer(scheduler, batch)
    (second,) = answer(scheduler, scheduler.schedule())
    assert (first.scheduled_s, first.produced_s) == (1.0, 3.0), "the clock is looked at when a step is submitted, too"
    assert (second.scheduled_s, second.produced_s) == (1.0, 5.0)


def test_accepted_drafts_end_at_the_stop() -> None:
    """A row may gain several tokens in a step; what follows a stop is dropped."""
    scheduler = make_scheduler()
    scheduler.add(request("a", 3, stop=(9,)))
    batch = scheduler.schedule()
    (output,) = updated(scheduler, batch, step_output([RowOutput((7, 9, 8))]))
    assert (output.token_ids, output.finish_reason) == ((7, 9), "stop")
