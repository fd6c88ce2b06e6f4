"""Sequences of a model with a state share what lies before a snapshot, and wait for one that is about to be taken."""

from __future__ import annotations

from itertools import pairwise

import pytest

from realizar.batch import NO_MOVES, ScheduledBatch
from realizar.kv_cache.manager import KVCacheManager
from realizar.outputs import RowError
from realizar.request import Request
from realizar.scheduler.pace import Pace
from realizar.scheduler.scheduler import Scheduler
from scheduler.scheduler_runs import answer, make_scheduler, request, shape, step

SYSTEM = tuple(range(1, 13))  # six blocks


def scheduler_with_states(num_snapshots: int = 16, num_blocks: int = 100) -> Scheduler:
    return make_scheduler(max_step_tokens=40, has_state=True, num_snapshots=num_snapshots, num_blocks=num_blocks)


def shared(name: str, user: tuple[int, ...], n: int = 1, salt: str | None = None) -> Request:
    """A system message and a user's, and a generation prompt of one token; marks are the ends of both."""
    prompt = (*SYSTEM, *user, 99)
    return request(name, prompt, 4, n, salt=salt, marks=(len(SYSTEM), len(prompt) - 1))


def run(scheduler: Scheduler) -> ScheduledBatch:
    """A whole step."""
    batch = scheduler.schedule()
    answer(scheduler, batch)
    scheduler.take_closed_rows()
    scheduler.audit()
    return batch


def finish(scheduler: Scheduler) -> None:
    while scheduler.has_work:
        run(scheduler)


def test_chunks_end_where_snapshots_are_taken() -> None:
    scheduler = scheduler_with_states()
    scheduler.add(shared("a", (50, 51, 52, 53, 54, 55)))
    batches = [run(scheduler) for _ in range(4)]
    assert [shape(batch) for batch in batches[:3]] == [[(0, 0, 12, False)], [(0, 12, 6, False)], [(0, 18, 1, True)]]
    assert [batch.state_moves.taken for batch in batches] == [((0, 0),), ((0, 1),), (), ((0, 2),)]  # the answer's
    assert all(batch.state_moves.restored == () for batch in batches)


@pytest.mark.parametrize(("token_s", "ends"), [(1e-6, (4096,)), (30e-6, (2048, 4096))])
def test_snapshots_within_a_message_are_taken_where_chunks_end(token_s: float, ends: tuple[int, ...]) -> None:
    """A step may have 4,096 tokens, and half as many where the measured speed gives it no more."""
    cache = KVCacheManager(
        [None], [400], block_size=16, num_rows=1, context_length=6000, max_step_tokens=4096,
        has_state=True, num_snapshots=64,
    )  # fmt: skip
    pace = Pace(4.0, 64)
    pace.observe(0, 1000, 1000 * token_s)
    clock = iter(range(1000))
    scheduler = Scheduler(cache, pace=pace, clock=lambda: token_s * next(clock))
    scheduler.add(request("a", tuple(range(5000)), 1, salt=None))
    batches = [run(scheduler) for _ in range(len(ends) + 1)]
    assert [(start, start + count) for ((_, start, count, _),) in map(shape, batches)] == [*pairwise((0, *ends, 5000))]
    assert [len(batch.state_moves.taken) for batch in batches] == [1] * len(ends) + [0]


def test_a_sequence_starts_from_the_longest_prefix_with_a_snapshot() -> None:
    scheduler = scheduler_with_states()
    scheduler.add(shared("a", (*range(50, 56), 56, 57)))
    finish(scheduler)
    scheduler.add(shared("b", (*range(50, 56), 66, 67)))
    first = run(scheduler)
    assert shape(first) == [(0, 12, 6, False)]  # up to where both were seen to part
    assert first.state_moves.restored == ((0, 0),)
    assert len(first.state_moves.taken) == 1
    assert shape(run(scheduler)) == [(0, 18, 2, False)]
    finish(scheduler)
    scheduler.add(shared("c", (*range(50, 56), 70, 71, 72)))
    assert shape(run(scheduler))[0][:2] == (0, 18)


def test_a_few_tokens_after_a_snapshot_are_a_place_at_the_end_of_the_last_message_alone() -> None:
    """Others are computed again sooner than a step more, and memory for a state, are worth."""
    scheduler = scheduler_with_states()
    scheduler.add(shared("a", (50, 51, 52, 53, 54, 55)))
    finish(scheduler)
    scheduler.add(shared("b", (50, 51, 60, 61)))
    first = run(scheduler)
    assert shape(first) == [(0, 12, 4, False)]  # not where both part
    assert len(first.state_moves.taken) == 1


def test_tenants_share_no_snapshot() -> None:
    scheduler = scheduler_with_states()
    for salt in ("a", "b", None):
        scheduler.add(shared(f"of {salt}", (50, 51), salt=salt))
        assert shape(run(scheduler)) == [(0, 0, 12, False)]
        finish(scheduler)


def test_requests_that_begin_alike_compute_the_beginning_once() -> None:
    """The second and third wait for the snapshot after the system message, and one with another beginning goes on."""
    scheduler = scheduler_with_states()
    scheduler.add(shared("a", (50, 51, 52, 53)))
    scheduler.add(shared("b", (60, 61, 62, 63)))
    scheduler.add(request("c", (80, 81, 82), 4))
    assert shape(run(scheduler)) == [(0, 0, 12, False), (1, 0, 3, True)]
    second = run(scheduler)
    assert {(row, start) for row, start, _, _ in shape(second)} == {(0, 12), (1, 3), (2, 12)}
    assert second.state_moves.restored == ((2, 0),)


def test_nobody_waits_for_blocks_without_a_snapshot() -> None:
    """The second has more in common with the first than will be kept, and does not wait for the rest of it."""
    scheduler = scheduler_with_states()
    scheduler.add(request("a", (*SYSTEM, 50, 51, 52, 53, 54, 55, 99), 4, salt=None, marks=(18,)))
    scheduler.add(request("b", (*SYSTEM, 60, 61, 62, 63, 64, 65, 99), 4, salt=None, marks=(18,)))
    assert shape(run(scheduler)) == [(0, 0, 18, False), (1, 0, 18, False)]


def test_choices_compute_the_prompt_once() -> None:
    scheduler = scheduler_with_states()
    scheduler.add(shared("a", (50, 51, 52, 53), n=3))
    assert shape(run(scheduler)) == [(0, 0, 12, False)]
    assert shape(run(scheduler)) == [(0, 12, 4, False)]
    third = run(scheduler)
    assert shape(third) == [(0, 16, 1, True), (1, 16, 1, True), (2, 16, 1, True)]
    assert third.state_moves.restored == ((1, 1), (2, 1))


def test_a_preempted_sequence_starts_again_from_a_snapshot() -> None:
    scheduler = scheduler_with_states(num_blocks=19)
    scheduler.add(request("a", 17, 4, marks=(16,)))
    scheduler.add(request("b", 17, 20, marks=(16,)))
    batches = []
    while scheduler.has_work:
        batches.append(run(scheduler))
    assert scheduler.counts.num_preemptions == 1
    (again,) = [batch for batch in batches if batch.state_moves.restored]
    assert shape(again)[-1][:2] == (1, 18)  # in its answer


def test_a_lost_step_leaves_no_snapshot() -> None:
    scheduler = scheduler_with_states()
    scheduler.add(shared("a", (50, 51, 52, 53)))
    scheduler.add(shared("b", (50, 51, 52, 53), salt="other"))
    batch = scheduler.schedule()
    assert batch.state_moves.taken
    scheduler.lose([batch], RowError("lost"))
    scheduler.take_closed_rows()
    scheduler.audit()
    scheduler.add(shared("c", (50, 51, 52, 53)))
    assert shape(run(scheduler)) == [(0, 0, 12, False)]


def test_what_was_read_before_a_clear_is_found_by_nobody() -> None:
    """A prompt that was half read leaves nothing that a later one could start from, and nobody waits for it."""
    cache = KVCacheManager(
        [None], [100], block_size=2, num_rows=3, context_length=100, max_step_tokens=16,
        has_state=True, num_snapshots=16,
    )  # fmt: skip
    scheduler = Scheduler(cache)
    prompt = tuple(range(1, 40))
    scheduler.add(request("a", prompt, 4, salt=None, marks=(8, 16, 24, 32)))
    for _ in range(2):
        run(scheduler)
    cache.forget()
    scheduler.add(request("b", prompt, 4, salt=None, marks=(8, 16, 24, 32)))
    assert [start for _, start, _, _ in shape(run(scheduler))] == [16, 0]
    finish(scheduler)
    kept = cache.snapshots.counts
    assert kept.kept == 5  # of the second alone, its answer's among them
    scheduler.add(request("c", prompt, 4, salt=None, marks=(8, 16, 24, 32)))
    assert shape(run(scheduler))[0][1] == 38


def test_a_choice_counts_what_was_dropped_for_its_blocks() -> None:
    """Also for those of its answer, after its prompt was read."""
    scheduler = scheduler_with_states(num_blocks=20)
    scheduler.add(request("a", (*SYSTEM, 50, 51, 99), 4, marks=(len(SYSTEM), 14)))
    finish(scheduler)
    scheduler.add(request("b", tuple(range(60, 75)), 20, marks=()))
    outputs = []
    while scheduler.has_work:
        batch = scheduler.schedule()
        outputs += answer(scheduler, batch)
        scheduler.take_closed_rows()
    assert outputs[0].snapshots.dropped == 0
    assert outputs[-1].snapshots.dropped > 0


def test_a_model_without_snapshots_copies_nothing() -> None:
    scheduler = scheduler_with_states(0)
    scheduler.add(shared("a", (50, 51, 52, 53)))
    assert shape(batch := run(scheduler)) == [(0, 0, 17, True)]
    assert batch.state_moves is NO_MOVES
    assert step(scheduler) == [(0, 17, 1, True)]
