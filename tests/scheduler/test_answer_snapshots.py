"""Snapshots of a state within an answer: where it ends, and before its first call, the next turn's prompt starts."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from realizar.batch import ScheduledBatch
from realizar.request import Request
from realizar.sampling_params import StructuredOutput
from realizar.scheduler.scheduler import Scheduler
from scheduler.scheduler_runs import make_scheduler, request, shape
from step_inputs import RowOutput, rows_of, step_output, updated

CALL, STOP = 70, 71
PROMPT = (*range(1, 12), 99)  # its last message ends after eleven tokens
SAID = (50, 51, 52, 53, 54, CALL, 55, 56, 57, 58, STOP)


def scheduler_with_states(num_snapshots: int = 64, max_running: int = 4, drafts: int = 0) -> Scheduler:
    return make_scheduler(
        max_step_tokens=40, has_state=True, num_snapshots=num_snapshots, max_running=max_running, drafts=drafts,
        num_blocks=400,
    )  # fmt: skip


def asked(name: str, prompt: tuple[int, ...], end: int | None = None) -> Request:
    """A turn whose last message ends before the prompt's last token, or where `end` says."""
    marks = (len(prompt) - 1 if end is None else end,)
    return replace(request(name, prompt, 30, salt=None, stop=(STOP,), marks=marks), call_ids=(CALL,))


def run(scheduler: Scheduler, said: tuple[int, ...], in_flight: int = 1) -> list[ScheduledBatch]:
    """Run all, each with this answer; `in_flight` steps are scheduled before the results of the first are known."""
    submitted, batches, counts = deque[ScheduledBatch](), list[ScheduledBatch](), dict[int, int]()
    while scheduler.has_work or submitted:
        while len(submitted) < in_flight and (batch := scheduler.schedule()).num_rows:
            submitted.append(batch)
            batches.append(batch)
        batch = submitted.popleft()
        rows = []
        for row in rows_of(batch):
            place = counts.get(row.sequence_id, 0)
            counts[row.sequence_id] = place + row.sample
            rows.append(RowOutput((said[min(place, len(said) - 1)],) if row.sample else ()))
        updated(scheduler, batch, step_output(rows))
        scheduler.take_closed_rows()
        scheduler.audit()
    return batches


def start(scheduler: Scheduler, prompt: tuple[int, ...]) -> int:
    """Tokens that a prompt starts from."""
    scheduler.add(asked(f"of {prompt}", prompt))
    return shape(run(scheduler, (STOP,))[0])[0][1]


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("length", range(1, 12))
def test_the_next_turn_starts_where_the_answer_ended(length: int, in_flight: int) -> None:
    scheduler = scheduler_with_states()
    scheduler.add(asked("a", PROMPT))
    said = (*SAID[: length - 1], STOP)
    run(scheduler, said, in_flight)
    computed = len(PROMPT) + length - (in_flight == 1)  # the step after the last token was scheduled with others
    assert start(scheduler, (*PROMPT, *said, 80, 81, 82)) == computed // 2 * 2


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_call_that_is_written_anew_starts_before_it(in_flight: int) -> None:
    scheduler = scheduler_with_states()
    scheduler.add(asked("a", PROMPT))
    run(scheduler, SAID, in_flight)
    before = (*PROMPT, *SAID[:5])
    assert start(scheduler, (*before, CALL, 60, 80, 81)) == len(before) // 2 * 2
    assert start(scheduler, (*PROMPT, *SAID, 80, 81)) >= len(PROMPT) + 10
    assert start(scheduler, (*PROMPT[:11], 80, 81)) == 10  # of an answer that is left out, or its reasoning is


def test_what_lies_between_is_given_back() -> None:
    scheduler = scheduler_with_states()
    scheduler.add(asked("a", PROMPT))
    batches = run(scheduler, SAID)
    assert sum(len(batch.state_moves.taken) for batch in batches) == 7
    counts = scheduler._cache.snapshots.counts
    assert (counts.kept, counts.taken, counts.dropped) == (3, 3, 0)  # of the prompt, before the call, and at the end
    assert scheduler._cache.snapshots.device.counts.used == 0


@pytest.mark.parametrize("way", ["prompt", "call", "end"])
def test_under_pressure_that_place_stays_from_which_the_turn_before_went_on(way: str) -> None:
    """Of three turns, the second of which started at one of the places that the first had left."""
    scheduler = scheduler_with_states(16)
    next_part = {"prompt": (1, 2, 3, 4), "call": (*SAID[:5], CALL, 60, 61), "end": SAID}[way]
    first = (*PROMPT[:11], *(() if way == "prompt" else PROMPT[11:]))
    scheduler.add(asked("first", PROMPT))
    run(scheduler, SAID)
    second = (*first, *next_part, *range(80, 89), 99)
    scheduler.add(asked("second", second))
    run(scheduler, SAID)
    for number in range(12):  # others come, of whom each leaves two, for which what is weak is given up
        scheduler.add(replace(asked(f"other {number}", (100 + number, *PROMPT)), cache_salt="others"))
        run(scheduler, SAID[:4])
    ends = {"prompt": len(second) - 1, "call": len(second) + 5, "end": len(second) + len(SAID) - 1}
    assert start(scheduler, (*second, *SAID, 80, 81, 82)) == ends[way] // 2 * 2


def test_an_answer_that_is_broken_off_is_gone_on_from() -> None:
    scheduler = scheduler_with_states()
    scheduler.add(asked("a", PROMPT))
    said = []
    for token_id in SAID[:9]:
        while not (batch := scheduler.schedule()).columns.samples.any():
            updated(scheduler, batch, step_output([RowOutput(())]))
        updated(scheduler, batch, step_output([RowOutput((token_id,))]))
        said.append(token_id)
    scheduler.abort("a")
    scheduler.take_closed_rows()
    assert start(scheduler, (*PROMPT, *said, 80, 81, 82)) == 20


def test_many_answers_are_copied_at_fewer_blocks() -> None:
    scheduler = scheduler_with_states(max_running=9)
    for number in range(9):
        scheduler.add(replace(asked(str(number), (100 + number, *PROMPT)), cache_salt=str(number)))
    ends = [
        int(batch.columns.num_context_tokens[batch.columns.numbers.tolist().index(row)])
        for batch in run(scheduler, SAID)
        for row, _ in batch.state_moves.taken
        if len(batch.columns) == 9
    ]
    assert {end for end in ends if end > 13} == {16, 20}


@pytest.mark.parametrize(("num_snapshots", "kept"), [(7, 0), (8, 1), (16, 2), (64, 4)])
def test_so_many_answers_are_copied_as_there_is_memory_for(num_snapshots: int, kept: int) -> None:
    scheduler = scheduler_with_states(num_snapshots)
    for number in range(4):
        scheduler.add(replace(asked(str(number), (100 + number, *PROMPT)), cache_salt=str(number)))
    batches = run(scheduler, SAID)
    written = {row for batch in batches[-6:] for row, _ in batch.state_moves.taken}
    assert len(written) == kept


def test_what_is_uncertain_is_not_copied() -> None:
    """Drafts, and tokens that a grammar may have computed again; without them there are copies."""
    scheduler = scheduler_with_states(drafts=2)
    repeated = asked("a", (*range(50, 54), 99))
    structured = replace(repeated.sampling, structured=StructuredOutput("regex", "a*"))
    scheduler.add(replace(repeated, request_id="b", sampling=structured, cache_salt="b"))
    batches = run(scheduler, SAID[:3])
    assert all(not batch.state_moves.taken for batch in batches if batch.columns.only_decodes)
    scheduler = scheduler_with_states(drafts=2)
    scheduler.add(asked("a", PROMPT))
    batches = run(scheduler, (1, 90, 2, 91, 3, 92, 4, STOP))
    for batch in batches:
        uncertain = dict(zip(batch.columns.numbers.tolist(), batch.columns.num_uncertain.tolist(), strict=True))
        assert not any(uncertain[row] for row, _ in batch.state_moves.taken)
    assert any(batch.state_moves.taken for batch in batches[2:])
    assert any(batch.columns.num_drafts.any() for batch in batches)


def test_a_text_that_is_no_conversation_is_not_copied() -> None:
    scheduler = scheduler_with_states()
    scheduler.add(replace(asked("a", PROMPT), prompt_marks=()))
    assert not any(batch.state_moves.taken for batch in run(scheduler, SAID))
