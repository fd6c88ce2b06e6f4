"""Rows whose grammar's process is killed, stopped, slow or closed: their masks come all the same, or their error."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

from realizar.errors import InvalidRequestError
from realizar.sampling_params import StructuredOutput
from realizar.structured.workers import spread
from realizar.structured.workers.followed import FollowedGrammar
from realizar.structured.workers.messages import Step
from realizar.structured.workers.service import GrammarService
from realizar.structured.workers.worker import GrammarWorker, WorkerLimits
from structured.grammar_followers import (
    DIGITS,
    LETTERS,
    Follower,
    is_alive,
    make_service,
    step,
    wait_for,
)
from structured.grammar_walks import TOKENS
from waits import HANG_S


def test_a_killed_process_costs_nothing(service: GrammarService) -> None:
    """Its rows go on with the same masks; those of other grammars stay where they are."""
    killed = [Follower(service, LETTERS, seed) for seed in range(3)]
    other = Follower(service, DIGITS)
    for _ in range(3):
        step(service, killed[0], other, *killed[1:])
    worker, beside = killed[0].row.worker, other.row.worker
    assert worker is not None
    os.kill(worker.pid, signal.SIGKILL)
    for _ in range(3):
        step(service, killed[0], other, *killed[1:])
    assert killed[0].row.worker is killed[2].row.worker is not worker
    assert other.row.worker is beside
    for each in (*killed, other):
        service.close_row(each.row)


def test_stopped_processes_delay_nobody_and_are_replaced(
    service: GrammarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masks of others come at once; when their time is over, all that hang are replaced together."""
    stopped = [Follower(service, StructuredOutput("regex", f"[a-f]{{3,4{number}}}x")) for number in range(3)]
    other = Follower(service, DIGITS)
    step(service, *stopped, other)
    workers = [each.row.worker for each in stopped]
    beside = other.row.worker
    skipped_s = 0.0
    monkeypatch.setattr(service._masks, "_clock", lambda: time.monotonic() + skipped_s)
    for worker in workers:
        assert worker is not None
        os.kill(worker.pid, signal.SIGSTOP)
    asked = service.ask([(each.row, ()) for each in (*stopped, other)])
    while not asked[3].done:
        service.wait(HANG_S)
    assert [each.done for each in asked[:3]] == [False] * 3
    other.check(service.read(asked[3]))
    skipped_s = WorkerLimits().step_s
    service.wait(0)
    for worker in workers:
        assert worker is not None
        assert not is_alive(worker.pid)
    while not all(each.done for each in asked):
        service.wait(HANG_S)
    for each, masks, worker in zip(stopped, asked, workers, strict=False):
        each.check(service.read(masks))
        assert each.row.worker is not worker
    for masks in asked:
        service.drop(masks)
    assert other.row.worker is beside
    step(service, other, *stopped)
    for each in (*stopped, other):
        service.close_row(each.row)


def test_a_row_is_asked_for_again_while_its_masks_are_due(service: GrammarService) -> None:
    """What was dropped is computed, and nobody reads it; the places of masks are used again."""
    row = Follower(service, LETTERS)
    step(service, row)
    num_places = service._masks._places.num_places
    for drafts in ((TOKENS.index(b"a"),), (), (TOKENS.index(b"b"), TOKENS.index(b"c"))):
        dropped = service.ask([(row.row, drafts)])
        service.drop(dropped[0])
        (asked,) = service.ask([(row.row, drafts)])
        while not asked.done:
            service.wait(HANG_S)
        assert service.read(asked).shape[0] == len(drafts) + 1
        assert np.array_equal(service.read(asked)[0], row.expected()[0])
        service.drop(asked)
    for _ in range(5):
        step(service, row)
    assert service._masks._places.num_places <= num_places + 12
    service.close_row(row.row)


def test_a_row_that_is_closed_while_its_masks_are_due_is_forgotten(service: GrammarService) -> None:
    """Also if its process ends meanwhile; others of the same grammar go on."""
    closed, staying = Follower(service, LETTERS, 1), Follower(service, LETTERS, 2)
    step(service, closed, staying)
    assert closed.row.worker is not None
    os.kill(closed.row.worker.pid, signal.SIGSTOP)
    asked = service.ask([(closed.row, ()), (staying.row, ())])
    service.close_row(closed.row)
    service.drop(asked[0])
    os.kill(closed.row.worker.pid, signal.SIGKILL)
    while not asked[1].done:
        service.wait(HANG_S)
    staying.check(service.read(asked[1]))
    service.drop(asked[1])
    step(service, staying)
    service.close_row(staying.row)


def test_a_row_that_is_closed_before_its_masks_are_asked_for_costs_nothing(service: GrammarService) -> None:
    """Its process, which is told to forget it with the next question, has another one when it is asked for."""
    closed, staying = Follower(service, LETTERS, 1), Follower(service, LETTERS, 2)
    step(service, closed, staying)
    worker = staying.row.worker
    assert worker is not None
    os.kill(worker.pid, signal.SIGSTOP)
    (first,), (later,) = service.ask([(staying.row, ())]), service.ask([(closed.row, ())])
    service.drop(later)
    service.close_row(closed.row)
    os.kill(worker.pid, signal.SIGCONT)
    while not first.done:
        service.wait(HANG_S)
    staying.check(service.read(first))
    service.drop(first)
    assert later.done
    assert worker.num_rows == 1
    step(service, staying)
    assert staying.row.worker is worker
    service.close_row(staying.row)


def test_places_of_a_row_in_error_are_free_once(service: GrammarService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its masks are dropped while other rows are still followed anew."""
    poisonous = StructuredOutput("regex", "[a-f]{3,43}x")
    bad, *good = rows = [Follower(service, poisonous, seed) for seed in range(3)]
    step(service, *rows)
    send, may_go_on = GrammarWorker.send_step, threading.Event()

    def deadly(self: GrammarWorker, message: Step, timeout_s: float) -> None:
        if any(row.key == bad.row.key for row in message.rows):
            os.kill(self.pid, signal.SIGKILL)
        else:
            may_go_on.wait(HANG_S)
        send(self, message, timeout_s)

    monkeypatch.setattr(GrammarWorker, "send_step", deadly)
    asked = service.ask([(each.row, ()) for each in rows])
    while bad.row.error is None:
        service.wait(0.01)
    service.drop(asked[0])
    service.close_row(bad.row)
    may_go_on.set()
    while not all(each.done for each in asked[1:]):
        service.wait(HANG_S)
    again = service.ask([(each.row, ()) for each in good])
    assert len({each.place for each in (*asked[1:], *again)}) == 4
    for masks in (*asked[1:], *again):
        while not masks.done:
            service.wait(HANG_S)
        service.drop(masks)
    for each in good:
        service.close_row(each.row)


def test_the_row_that_ends_its_process_is_in_error(service: GrammarService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other rows are unharmed, though they share the process; no row may follow the grammar from then on."""
    poisonous = StructuredOutput("regex", "[a-f]{3,41}x")
    rows = [Follower(service, poisonous, seed) for seed in range(4)]
    bad, good = rows[1], [rows[0], *rows[2:]]
    for _ in range(3):
        step(service, *rows)
    send = GrammarWorker.send_step

    def deadly(self: GrammarWorker, message: Step, timeout_s: float) -> None:
        if any(row.key == bad.row.key for row in message.rows):
            os.kill(self.pid, signal.SIGKILL)
        send(self, message, timeout_s)

    monkeypatch.setattr(GrammarWorker, "send_step", deadly)
    masks = service.masks([(each.row, ()) for each in rows])
    assert bad.row.error == "following it crashed (SIGKILL)"
    assert not masks[1].any()
    for follower, mask in zip(good, (masks[0], *masks[2:]), strict=True):
        follower.check(mask)
    for _ in range(2):
        step(service, *good)
    (mask,) = service.masks([(bad.row, ())])
    assert not mask.any()
    with pytest.raises(InvalidRequestError, match="following it crashed"):
        service.prepare(poisonous)
    late = service.open_row(poisonous, ())
    assert late.error is not None
    for row in (late, *(each.row for each in rows)):
        service.close_row(row)


def test_many_rows_of_a_slow_grammar_get_more_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows move to them from their histories, and back when one dies; texts stay the same."""
    monkeypatch.setattr(spread, "_SLOW_S", 0.0)
    monkeypatch.setattr(spread, "_ENOUGH", 2)
    service = make_service(WorkerLimits(more_processes=2))
    rows = [Follower(service, LETTERS, seed) for seed in range(9)]
    grammar = rows[0].row.grammar
    deadline_s = time.monotonic() + HANG_S
    while len(grammar.more) < 2 and time.monotonic() < deadline_s:
        step(service, *rows)
        service.wait(0.01)
    assert len(grammar.workers) == 3
    step(service, *rows)
    counts = [sum(each.row.worker is worker for each in rows) for worker in grammar.workers]
    assert sum(counts) == 9
    assert counts == [worker.num_rows for worker in grammar.workers]
    assert min(counts) > 0
    others = grammar.workers[:2]
    os.kill(grammar.more[1].pid, signal.SIGKILL)
    for _ in range(3):
        step(service, *rows)
    assert grammar.workers[:2] == others
    pids = [worker.pid for worker in grammar.workers]
    for each in rows:
        service.close_row(each.row)
    service.prepare(StructuredOutput("regex", "another"))
    wait_for(lambda: sum(map(is_alive, pids)) == 1)
    assert len(grammar.workers) == 1
    service.close()


def test_a_process_that_comes_after_the_rows_have_ended_ends_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread, "_SLOW_S", 0.0)
    monkeypatch.setattr(spread, "_ENOUGH", 1)
    service, may_come, pids = make_service(WorkerLimits(more_processes=1, idle=0)), threading.Event(), []
    rows = [Follower(service, LETTERS, seed) for seed in range(2)]
    compiled = service._masks._repair._revive

    def late(given: FollowedGrammar) -> GrammarWorker:
        worker = compiled(given)
        pids.append(worker.pid)
        may_come.wait(HANG_S)
        return worker

    monkeypatch.setattr(service._masks._repair, "_revive", late)
    step(service, *rows)
    wait_for(lambda: bool(pids))
    for each in rows:
        service.close_row(each.row)
    service.prepare(StructuredOutput("regex", "another"))
    may_come.set()
    while service._masks._repairs:
        service.wait(HANG_S)
    service.prepare(StructuredOutput("regex", "yet another"))
    wait_for(lambda: not is_alive(pids[0]))
    service.close()
