"""Rows whose grammar's process is killed, stopped, slow or closed: their masks come all the same, or their error."""

from __future__ import annotations

import json
import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from realizar.errors import InvalidRequestError, RequestFailedError
from realizar.sampling_params import StructuredOutput
from realizar.structured.grammar import only_id
from realizar.structured.workers import mask_requests
from realizar.structured.workers import worker as handles
from realizar.structured.workers.mask_memory import MOST_TOKENS
from realizar.structured.workers.service import GrammarService
from realizar.structured.workers.worker import WorkerFactory, WorkerLimits
from structured.deadly_server import COMMAND, DEADLY
from structured.grammar_followers import (
    DIGITS,
    FACTORY,
    LETTERS,
    Follower,
    ask,
    end_workers,
    finish,
    make_service,
    served_masks,
    slots_of,
    step,
)
from structured.grammar_walks import TOKENS, masks_of
from waits import HANG_S, is_alive, wait_until

CRASHES = StructuredOutput("regex", "[a-f]{3,40}x|crash")


def test_a_killed_worker_costs_nothing(service: GrammarService) -> None:
    """Its rows go on with the same masks, in another one."""
    rows = [Follower(service, structured, seed) for structured in (LETTERS, DIGITS) for seed in range(3)]
    for _ in range(3):
        step(service, *rows)
    worker = rows[0].row.worker
    end_workers(service)
    for _ in range(3):
        step(service, *rows)
    assert worker is not None
    assert rows[0].row.worker is not worker
    for each in rows:
        service.close_row(each.row)


def test_rows_are_spread_over_the_workers() -> None:
    """Few of one grammar stay together; when a worker ends, those of others stay where they are."""
    service = make_service(WorkerLimits(workers=3))
    rows = [Follower(service, LETTERS, seed) for seed in range(3)]
    step(service, *rows)
    assert len({id(each.row.worker) for each in rows}) == 1
    rows += [Follower(service, (LETTERS, DIGITS)[seed % 2], seed) for seed in range(9)]
    step(service, *rows)
    counts = sorted(len(worker.slots) for worker in service._pool.workers.values())
    assert len(counts) == 3
    assert sum(counts) == 12
    assert counts[2] - counts[0] <= 3
    ended = rows[0].row.worker
    assert ended is not None
    assert ended.pid is not None
    beside = [(each, each.row.worker) for each in rows if each.row.worker is not ended]
    os.kill(ended.pid, signal.SIGKILL)
    for _ in range(2):
        step(service, *rows)
    assert all(each.row.worker is worker for each, worker in beside)
    service.close()


@pytest.mark.parametrize("has_ring", [True, False])
def test_many_workers_that_sleep_are_woken(has_ring: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one call of the system where it can, else by a message each."""
    rings, write = list[int](), getattr(os, "eventfd_write", None)
    if not has_ring:
        monkeypatch.delattr(os, "eventfd", raising=False)
    elif write is None:
        pytest.skip("the system has no eventfd")
    else:
        monkeypatch.setattr(os, "eventfd_write", lambda *given: rings.append(write(*given)))
    service = make_service(WorkerLimits(workers=5, stall_s=10 * HANG_S))
    rows = [Follower(service, (LETTERS, DIGITS)[seed % 2], seed) for seed in range(15)]
    for _ in range(4):
        step(service, *rows)
        workers = list(service._pool.workers.values())
        wait_until(lambda workers=workers: all(service._memory.sleeping[each.place] for each in workers))  # type: ignore[misc]
    assert len(workers) == 5
    assert bool(rings) == has_ring
    service.close()


def test_stopped_workers_are_replaced(service: GrammarService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for them meanwhile."""
    rows = [Follower(service, StructuredOutput("regex", f"[a-f]{{3,4{number}}}x")) for number in range(3)]
    step(service, *rows)
    skipped_s = 0.0
    monkeypatch.setattr(service._pool, "clock", lambda: time.monotonic() + skipped_s)
    pids = end_workers(service, signal.SIGSTOP)
    slots = ask(service, *rows)
    service.rows.wait(0)
    assert not service.rows.are_done(slots).any()
    while any(map(is_alive, pids)):
        skipped_s += 0.25
        service.rows.wait(0)
    finish(service, slots)
    for each, slot in zip(rows, slots, strict=True):
        each.check(service.rows.memory.of(slot, 0))
    step(service, *rows)
    for each in rows:
        service.close_row(each.row)


def test_a_row_is_asked_for_again_while_its_masks_are_due(service: GrammarService) -> None:
    """What is wanted no more is computed, and then what is wanted now."""
    row = Follower(service, LETTERS)
    step(service, row)
    assert row.row.worker is not None
    for drafts in ((TOKENS.index(b"a"),), (), (TOKENS.index(b"b"), TOKENS.index(b"c"))):
        os.kill(row.row.worker.pid, signal.SIGSTOP)
        slots = ask(service, row)
        service.rows.wanted[slots] = False
        service.rows.ask(slots, {row.row.slot: drafts})
        assert not service.rows.are_done(slots).any()
        os.kill(row.row.worker.pid, signal.SIGCONT)
        finish(service, slots)
        found = service.rows.memory.of(row.row.slot, len(drafts))
        assert found.shape[0] == len(drafts) + 1
        assert np.array_equal(found, row.expected(drafts))
    step(service, row)
    service.close_row(row.row)


def test_tokens_that_come_while_masks_are_due_are_not_lost(service: GrammarService) -> None:
    """As of a step that was given up: the row is followed anew from its history."""
    row = Follower(service, LETTERS)
    step(service, row)
    assert row.row.worker is not None
    os.kill(row.row.worker.pid, signal.SIGSTOP)
    slots = ask(service, row)
    row.choose(TOKENS.index(b"a"))
    service.rows.ask(slots, {})
    os.kill(row.row.worker.pid, signal.SIGCONT)
    finish(service, slots)
    assert np.array_equal(service.rows.memory.of(row.row.slot, 0), row.expected())
    for _ in range(3):
        step(service, row)
    service.close_row(row.row)


def test_many_tokens_at_once_are_taken_in(service: GrammarService) -> None:
    """More than there is room for in a question, and several as with drafts."""
    row = Follower(service, StructuredOutput("regex", "[a-f]{3,200}x"))
    for count in (1, 3, MOST_TOKENS, MOST_TOKENS + 5, 2):
        row.choose(*[TOKENS.index(b"a")] * count)
        assert np.array_equal(served_masks(service, [(row.row, ())])[0], row.expected())
    service.close_row(row.row)


def test_a_row_that_is_closed_while_its_masks_are_due_is_forgotten(service: GrammarService) -> None:
    """Its slot stays its own until then; also if its worker ends meanwhile. Others of the same grammar go on."""
    closed, staying = Follower(service, LETTERS, 1), Follower(service, LETTERS, 2)
    step(service, closed, staying)
    (pid,) = end_workers(service, signal.SIGSTOP)
    slots = ask(service, closed, staying)
    service.close_row(closed.row)
    other = Follower(service, DIGITS)
    assert other.row.slot != closed.row.slot
    os.kill(pid, signal.SIGKILL)
    step(service, other)
    finish(service, slots[1:])
    staying.check(service.rows.memory.of(staying.row.slot, 0))
    service.rows.wanted[slots] = False
    step(service, staying, other)
    for each in (staying, other):
        service.close_row(each.row)
    late = Follower(service, DIGITS)
    assert late.row.slot in (closed.row.slot, staying.row.slot, other.row.slot)
    service.close_row(late.row)


def test_what_workers_report_is_heard_while_each_look_finds_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at each look, as no row waits for it."""
    service = make_service(WorkerLimits(slots=2))
    memory, looks, heard = service.rows.memory, list[int](), list[int]()
    poll = service._pool.poll

    def noted_poll() -> Any:
        heard.append(1)
        return poll()

    monkeypatch.setattr(service._pool, "poll", noted_poll)
    monkeypatch.setattr(mask_requests, "_EVENTS_S", HANG_S)
    begin_s = mask_requests.time.monotonic()
    clock = SimpleNamespace(monotonic=lambda: begin_s + HANG_S / 4 * len(looks), sleep=time.sleep)
    monkeypatch.setattr(mask_requests, "time", clock)

    def is_heard_twice() -> bool:
        looks.append(1)
        memory.asked[1] += 1
        memory.answered[1] += 1
        service.rows.wait(0)
        return len(heard) > 1

    while not is_heard_twice():
        assert len(looks) < 10
    assert len(looks) == 5
    service.close()


def test_tokens_without_another_need_no_question() -> None:
    """The process has gone ahead of them; then it may stand still, or die, and goes on from where they end."""
    service = make_service(WorkerLimits(drafts=0))
    forced = StructuredOutput("regex", "abracadabra abracadabra[0-9]{2}name value name value[0-9]{3}")
    rows = [Follower(service, forced, seed) for seed in range(3)]
    step(service, *rows)
    memory, slots = service.rows.memory, slots_of(*rows)
    walk, count = FACTORY.compile(forced).start(), 0
    while (token_id := only_id(masks_of(FACTORY, [(walk, ())])[0][0])) is not None:
        walk.advance([token_id])
        count += 1
    assert count > 10
    wait_until(lambda: all(memory.forced_token(slot, count - 1) >= 0 for slot in slots.tolist()))
    worker, asked = rows[0].row.worker, memory.asked[slots].tolist()
    assert worker is not None
    os.kill(worker.pid, signal.SIGSTOP)
    for _ in range(count - 1):
        step(service, *rows)
    assert memory.asked[slots].tolist() == asked
    os.kill(worker.pid, signal.SIGCONT)
    step(service, *rows)
    assert memory.asked[slots].tolist() == [each + 1 for each in asked]
    end_workers(service)
    while not all(each.ended for each in rows):
        step(service, *rows)
    assert int(memory.asked[slots].sum() - sum(asked)) < sum(len(each.row.output) for each in rows)
    service.close()


@pytest.mark.parametrize("seed", range(3))
def test_masks_that_are_foreseen_are_the_same(seed: int) -> None:
    """Beside those of one process that is asked for each."""
    service = make_service(WorkerLimits(drafts=0))
    fields = {"name": {"enum": ["name", "value", "names"]}, "value": {"type": "integer", "minimum": 7, "maximum": 120}}
    schema = {"type": "object", "properties": fields, "required": ["name", "value"], "additionalProperties": False}
    grammars = (
        StructuredOutput("json_schema", json.dumps(schema)),
        StructuredOutput("choice", '["value value", "name"]'),
    )
    rows = [Follower(service, grammars[number % 2], 10 * seed + number) for number in range(6)]
    for _ in range(40):
        step(service, *rows)
    service.close()


def test_rows_beyond_all_slots_are_refused() -> None:
    service = make_service(WorkerLimits(slots=2))
    rows = [Follower(service, LETTERS, seed) for seed in range(2)]
    with pytest.raises(RequestFailedError, match="2 rows follow grammars"):
        Follower(service, LETTERS)
    step(service, *rows)
    service.close_row(rows[0].row)
    rows[0] = Follower(service, DIGITS)
    step(service, *rows)
    assert [grammar.num_rows for grammar in service.known._grammars.values()] == [1, 1]
    service.close()


def test_slots_of_rows_in_error_are_free_once() -> None:
    """Also if the row ends while others are still followed anew."""
    service = make_service(server_command=COMMAND)
    bad, *good = rows = [Follower(service, CRASHES, seed) for seed in range(3)]
    step(service, *rows)
    num_free = len(service.rows._free)
    bad.choose(DEADLY)
    slots = ask(service, *rows)
    while bad.row.error is None:
        service.rows.wait(0.01)
    service.close_row(bad.row)
    finish(service, slots[1:])
    for each in good:
        service.close_row(each.row)
    while service.rows._closed:
        service.rows.wait(0.01)
    assert len(service.rows._free) == len(set(service.rows._free)) == num_free + 3
    service.close()


@pytest.mark.parametrize("does", ["crash", "quit", "hang"])
def test_the_row_that_ends_its_worker_again_is_in_error(does: str) -> None:
    """Rows beside it are unharmed, in the same worker and of the same grammar; no row may follow that from then on."""
    service = make_service(WorkerLimits(step_s=1.0, stall_s=0.5), server_command=COMMAND)
    poisonous = StructuredOutput("regex", f"[a-f]{{3,41}}x|{does}")
    rows = [Follower(service, poisonous, seed) for seed in range(4)]
    beside = Follower(service, DIGITS)
    step(service, *rows, beside)
    bad, good = rows[1], [rows[0], *rows[2:]]
    for each in good:
        each.choose(TOKENS.index(b"a"))
    bad.choose(DEADLY)
    masks = served_masks(service, [(each.row, ()) for each in (*rows, beside)])
    assert bad.row.error is not None
    assert bad.row.error.startswith("following it ")
    assert bad.row.cause == ("engine" if does == "hang" else "request")
    assert not masks[1].any()
    for follower, mask in zip((*good, beside), (masks[0], *masks[2:]), strict=True):
        follower.check(mask)
    assert (bad.row.grammar.is_alone, beside.row.grammar.is_alone) == (True, False)
    (mask,) = served_masks(service, [(bad.row, ())])
    assert not mask.any()
    with pytest.raises((InvalidRequestError, RequestFailedError), match="following it"):
        service.prepare(poisonous)
    late = service.open_row(poisonous, ())
    assert late.error is not None
    service.close()


def test_the_same_death_of_one_worker_is_no_proof() -> None:
    """The second one is: a row whose worker was ended from outside, whatever it worked on, goes on."""
    service = make_service(server_command=COMMAND)
    row = Follower(service, CRASHES)
    step(service, row)
    grammar = row.row.grammar
    row.row.died_at = len(row.row.output) - 1  # as if that had happened a token before
    row.choose(TOKENS.index(b"a"))
    end_workers(service)
    step(service, row)
    assert row.row.error is None
    assert not grammar.is_condemned
    service.close()


def test_a_grammar_that_ends_a_worker_when_it_is_compiled_again_has_its_own() -> None:
    service = make_service(server_command=COMMAND)
    beside, bad = Follower(service, DIGITS), Follower(service, StructuredOutput("regex", "[a-f]{3,41}x|load-crash"))
    masks = served_masks(service, [(each.row, ()) for each in (bad, beside)])
    beside.check(masks[1])
    bad.check(masks[0])  # its own worker compiles it, as this crashes where grammars share one
    assert (bad.row.grammar.is_alone, beside.row.grammar.is_alone) == (True, False)
    service.close()


def test_a_grammar_that_ends_its_own_worker_when_it_is_compiled_is_refused() -> None:
    service = make_service(server_command=COMMAND)
    bad = Follower(service, StructuredOutput("regex", "[a-f]{3,41}x|load-crash"))
    bad.row.grammar.num_failed_loads = 1  # as if the next crash, where grammars share a worker, were the second
    (mask,) = served_masks(service, [(bad.row, ())])
    assert not mask.any()
    assert (bad.row.error, bad.row.cause) == ("compiling it crashed (SIGSEGV)", "request")
    with pytest.raises(InvalidRequestError, match="compiling it crashed"):
        service.prepare(bad.row.grammar.structured)
    service.close()


def test_a_slow_grammar_gets_a_worker_of_its_own() -> None:
    service = make_service(server_command=COMMAND)
    slow, beside = Follower(service, StructuredOutput("regex", "[a-f]{3,41}x|slow")), Follower(service, DIGITS)
    for _ in range(40):
        step(service, slow, beside)
        if slow.ended:
            service.close_row(slow.row)
            slow = Follower(service, StructuredOutput("regex", "[a-f]{3,41}x|slow"))
        if slow.row.grammar.is_alone:
            break
    step(service, slow, beside)
    assert slow.row.grammar.is_alone
    assert slow.row.worker is not beside.row.worker
    service.close()


def test_a_grammar_that_compiles_slowly_gets_a_worker_of_its_own() -> None:
    """The one that has compiled it; it ends with the grammar."""
    service = make_service(WorkerLimits(heavy_s=0.0, idle=0))
    rows = [Follower(service, structured) for structured in (LETTERS, DIGITS)]
    for _ in range(3):
        step(service, *rows)
    workers = [each.row.worker for each in rows]
    assert len(set(map(id, workers))) == 2
    for each in rows:
        service.close_row(each.row)
    pids = [worker.pid for worker in workers if worker is not None and worker.pid is not None]
    service.prepare(StructuredOutput("regex", "another"))
    wait_until(lambda: (service.rows.wait(0), not any(map(is_alive, pids)))[1])
    service.close()


def test_a_server_that_stands_still_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all its workers: nothing is waited for but the times in which they must answer."""
    monkeypatch.setattr(handles, "_ANSWER_LIMIT_S", 0.5)
    service = make_service(WorkerLimits(stall_s=0.5))
    row = Follower(service, LETTERS)
    step(service, row)
    assert service._factory.current is not None
    os.kill(service._factory.current._process.pid, signal.SIGSTOP)
    end_workers(service, signal.SIGSTOP)
    step(service, row)
    step(service, row)
    service.close()


def test_workers_that_end_one_after_the_other_are_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those that find no memory at all."""
    service = make_service()
    many = [f"{number} bottles" for number in range(5000)]  # more than the memory that a process has free at its start
    row = Follower(service, StructuredOutput("choice", json.dumps(many)))
    step(service, row)
    new = WorkerFactory.new
    monkeypatch.setattr(WorkerFactory, "new", lambda self, _bytes, *, may_wait: new(self, 1, may_wait=may_wait))
    end_workers(service)
    service.rows.wait(HANG_S)
    served_masks(service, [(row.row, ())])
    assert row.row.error is not None
    assert row.row.cause == "engine" or "compiling it" in row.row.error or "too much memory" in row.row.error
    service.close()


def test_slots_of_rows_that_ended_with_their_grammar_are_free() -> None:
    """Also if its own worker still owes an answer when nobody needs it any more."""
    service = make_service(WorkerLimits(heavy_s=0.0, idle=0, step_s=10 * HANG_S))
    row = Follower(service, LETTERS)
    step(service, row)
    num_free = len(service.rows._free)
    end_workers(service, signal.SIGSTOP)
    ask(service, row)
    service.close_row(row.row)
    service.prepare(DIGITS)
    wait_until(lambda: (service.rows.wait(0), len(service.rows._free) == num_free + 1)[1])
    service.close()
