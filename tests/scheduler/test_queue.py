"""Tests of the queue: which requests may wait, their order, and which may overtake."""

from __future__ import annotations

import pytest

from realizar.errors import InvalidRequestError, QueueFullError
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from scheduler.scheduler_runs import answer, make_scheduler, request, shape, step


def test_lower_numbers_start_sooner_and_equals_in_order_of_arrival() -> None:
    scheduler = make_scheduler(max_running=1)
    for name, priority in (("a", 0), ("b", 1), ("c", 0), ("d", -3), ("e", 1)):
        scheduler.add(request(name, 2, max_tokens=1, priority=priority))
    order = []
    while scheduler.has_work:
        batch = scheduler.schedule()
        order += [output.request_id for output in answer(scheduler, batch)]
        scheduler.take_closed_rows()
    assert order == ["d", "a", "c", "b", "e"]


@pytest.mark.parametrize("urgent", [-1, -3])
def test_a_waiting_request_is_overtaken_by_a_bounded_number(urgent: int) -> None:
    """A stream of urgent requests that never ends keeps nobody out: each step of priority is 64 arrivals."""
    scheduler = make_scheduler(max_running=1)
    scheduler.add(request("first", 2, max_tokens=1))
    scheduler.add(request("patient", 2, max_tokens=1, priority=0))
    before: list[str] = []
    for number in range(10_000):
        scheduler.add(request(f"urgent-{number}", 2, max_tokens=1, priority=urgent))
        before += [output.request_id for output in answer(scheduler, scheduler.schedule())]
        scheduler.take_closed_rows()
        if "patient" in before:
            break
    assert before[-1] == "patient"
    assert len(before) - 1 == pytest.approx(64 * -urgent, abs=2)


def test_the_least_urgent_gives_way() -> None:
    """Both need a third block where one is left: the later, more urgent one gets it."""
    scheduler = make_scheduler(num_blocks=5)
    scheduler.add(request("a", 4, max_tokens=6, priority=1))
    scheduler.add(request("b", 4, max_tokens=6, priority=0))
    assert step(scheduler) == [(0, 0, 4, True), (1, 0, 4, True)]
    assert step(scheduler) == [(0, 4, 1, True)]
    assert scheduler._open.get(0) is scheduler._open.waiting[""][0]
    assert scheduler.counts.num_preemptions == 1


def test_a_preempted_sequence_passes_a_more_urgent_one_that_waits_for_its_row() -> None:
    scheduler = make_scheduler(num_blocks=6, max_running=1)
    scheduler.add(request("a", 5, max_tokens=5, priority=1))
    step(scheduler)
    scheduler._preempt(scheduler._open.running[0])
    scheduler.add(request("b", 5, max_tokens=5, priority=0))
    assert shape(scheduler.schedule()) == [(0, 4, 2, True)]


def test_a_full_queue_refuses() -> None:
    scheduler = make_scheduler(max_running=2, max_queued=3)
    for name in "abcde":  # two for the rows, three to wait
        scheduler.add(request(name, 2, n=2))
    with pytest.raises(QueueFullError, match="5 waiting, limit 5") as refused:
        scheduler.add(request("f", 2))
    assert refused.value.retry_after_s == 1.0
    step(scheduler)
    with pytest.raises(QueueFullError, match="4 waiting, limit 3"):
        scheduler.add(request("f", 2))
    scheduler.abort("e")
    scheduler.abort("d")
    scheduler.add(request("f", 2))
    scheduler.audit()


@pytest.mark.parametrize(
    ("ended_s", "now_s", "wait_s"),
    [((), 100.0, 1.0), ((10.0, 14.0, 18.0), 22.0, 4.0), ((10.0, 14.0, 18.0), 1000.0, 60.0), ((50.0,) * 100, 50.1, 1.0)],
)
def test_the_time_to_try_again_is_that_of_the_last_ends(
    ended_s: tuple[float, ...], now_s: float, wait_s: float
) -> None:
    scheduler = make_scheduler(max_running=1, max_queued=0)
    scheduler.add(request("a", 2))
    scheduler._ended_s.extend(ended_s)
    scheduler._clock = lambda: now_s
    with pytest.raises(QueueFullError) as refused:
        scheduler.add(request("b", 2))
    assert refused.value.retry_after_s == pytest.approx(wait_s)


def test_an_aborted_request_leaves_its_blocks_at_once() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", 9))
    batch = scheduler.schedule()
    scheduler.abort("a")
    counts = scheduler._cache.counts[0]
    assert (counts.used, counts.cached + counts.free) == (0, 100)
    assert answer(scheduler, batch) == []
    scheduler.audit()


def test_a_pooled_request_generates_nothing() -> None:
    scheduler = make_scheduler()
    with pytest.raises(InvalidRequestError, match="a pooled request generates nothing, not 4 tokens"):
        scheduler.add(Request("a", (1, 2), SamplingParams(), 4, pooling="last"))
