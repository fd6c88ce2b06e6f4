"""Rows whose grammar's process is killed, stopped, slow or closed: their masks come all the same, or their error."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest

from realizar.errors import InvalidRequestError, RequestFailedError
from realizar.sampling_params import StructuredOutput
from realizar.structured.grammar import only_id
from realizar.structured.workers.followed import FollowedGrammar
from realizar.structured.workers.mask_memory import MOST_TOKENS
from realizar.structured.workers.service import GrammarService
from realizar.structured.workers.worker import GrammarWorker, WorkerLimits
from structured.grammar_followers import (
    DIGITS,
    FACTORY,
    LETTERS,
    Follower,
    ask,
    finish,
    make_service,
    slots_of,
    step,
)
from structured.grammar_walks import TOKENS
from waits import HANG_S, is_alive, wait_until


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
    monkeypatch.setattr(service.rows, "_clock", lambda: time.monotonic() + skipped_s)
    for worker in workers:
        assert worker is not None
        os.kill(worker.pid, signal.SIGSTOP)
    asked = ask(service, *stopped, other)
    finish(service, asked[3:])
    assert not service.rows.are_done(asked[:3]).any()
    other.check(service.rows.memory.of(asked[3], 0))
    skipped_s = WorkerLimits().step_s
    service.rows.wait(0)
    for worker in workers:
        assert worker is not None
        assert not is_alive(worker.pid)
    finish(service, asked)
    for each, slot, worker in zip(stopped, asked, workers, strict=False):
        each.check(service.rows.memory.of(slot, 0))
        assert each.row.worker is not worker
    assert other.row.worker is beside
    step(service, other, *stopped)
    for each in (*stopped, other):
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


def test_choices_that_come_while_masks_are_due_are_not_lost(service: GrammarService) -> None:
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


def test_many_choices_at_once_are_taken_in(service: GrammarService) -> None:
    """More than there is room for in a question, and several as with drafts."""
    row = Follower(service, StructuredOutput("regex", "[a-f]{3,200}x"))
    for count in (1, 3, MOST_TOKENS, MOST_TOKENS + 5, 2):
        row.choose(*[TOKENS.index(b"a")] * count)
        assert np.array_equal(service.masks([(row.row, ())])[0], row.expected())
    service.close_row(row.row)


def test_a_row_that_is_closed_while_its_masks_are_due_is_forgotten(service: GrammarService) -> None:
    """Its slot stays its own until then; also if its process ends meanwhile. Others of the same grammar go on."""
    closed, staying = Follower(service, LETTERS, 1), Follower(service, LETTERS, 2)
    step(service, closed, staying)
    assert closed.row.worker is not None
    os.kill(closed.row.worker.pid, signal.SIGSTOP)
    slots = ask(service, closed, staying)
    service.close_row(closed.row)
    other = Follower(service, DIGITS)
    assert other.row.slot != closed.row.slot
    step(service, other)
    os.kill(closed.row.worker.pid, signal.SIGKILL)
    finish(service, slots[1:])
    staying.check(service.rows.memory.of(staying.row.slot, 0))
    service.rows.wanted[slots] = False
    step(service, staying, other)
    for each in (staying, other):
        service.close_row(each.row)
    late = Follower(service, DIGITS)
    assert late.row.slot in (closed.row.slot, staying.row.slot, other.row.slot)
    service.close_row(late.row)


def test_tokens_without_a_choice_need_no_question() -> None:
    """The process has gone ahead of them; then it may stand still, or die, and goes on from where they end."""
    service = make_service(WorkerLimits(drafts=0))
    forced = StructuredOutput("regex", "abracadabra abracadabra[0-9]{2}name value name value[0-9]{3}")
    rows = [Follower(service, forced, seed) for seed in range(3)]
    step(service, *rows)
    memory, slots = service.rows.memory, slots_of(*rows)
    walk, count = FACTORY.compile(forced).start(), 0
    while (token_id := only_id(FACTORY.masks([(walk, ())])[0][0])) is not None:
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
    end_process(rows[0])
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
    assert [grammar.num_rows for grammar in service._known._grammars.values()] == [1, 1]
    service.close()


def test_without_a_bell_processes_get_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on systems that have no eventfd."""
    monkeypatch.delattr(os, "eventfd")
    service = make_service()
    rows = [Follower(service, structured, seed) for structured in (LETTERS, DIGITS) for seed in range(3)]
    for _ in range(3):
        step(service, *rows)
    assert rows[0].row.worker is not None
    os.kill(rows[0].row.worker.pid, signal.SIGKILL)
    for _ in range(3):
        step(service, *rows)
    service.close()


def deadly_follow(monkeypatch: pytest.MonkeyPatch, bad: Follower, may_go_on: threading.Event) -> None:
    """A process that is to follow this row from now on is killed; other rows wait."""
    follow = GrammarWorker.follow

    def deadly(self: GrammarWorker, key: int, slot: int, token_ids: Sequence[int]) -> None:
        if slot == bad.row.slot:
            os.kill(self.pid, signal.SIGKILL)
        else:
            may_go_on.wait(HANG_S)
        follow(self, key, slot, token_ids)

    monkeypatch.setattr(GrammarWorker, "follow", deadly)


def end_process(follower: Follower) -> None:
    assert follower.row.worker is not None
    os.kill(follower.row.worker.pid, signal.SIGKILL)


def test_slots_of_rows_in_error_are_free_once(service: GrammarService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the row ends while others are still followed anew."""
    poisonous = StructuredOutput("regex", "[a-f]{3,43}x")
    bad, *good = rows = [Follower(service, poisonous, seed) for seed in range(3)]
    step(service, *rows)
    may_go_on = threading.Event()
    deadly_follow(monkeypatch, bad, may_go_on)
    num_free = len(service.rows._free)
    end_process(bad)
    slots = ask(service, *rows)
    while bad.row.error is None:
        service.rows.wait(0.01)
    service.close_row(bad.row)
    may_go_on.set()
    finish(service, slots[1:])
    for each in good:
        service.close_row(each.row)
    service.rows.wait(0)
    assert len(service.rows._free) == len(set(service.rows._free)) == num_free + 3


def test_the_row_that_ends_its_process_is_in_error(service: GrammarService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other rows are unharmed, though they share the process; no row may follow the grammar from then on."""
    poisonous = StructuredOutput("regex", "[a-f]{3,41}x")
    rows = [Follower(service, poisonous, seed) for seed in range(4)]
    bad, good = rows[1], [rows[0], *rows[2:]]
    for _ in range(3):
        step(service, *rows)
    may_go_on = threading.Event()
    may_go_on.set()
    deadly_follow(monkeypatch, bad, may_go_on)
    end_process(bad)
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


def test_many_rows_of_a_slow_grammar_get_more_processes() -> None:
    """Rows move to them from their histories, and back when one dies; texts stay the same."""
    service = make_service(WorkerLimits(more_processes=2, slow_s=0.0, slow_answers=2))
    rows = [Follower(service, LETTERS, seed) for seed in range(9)]
    grammar = rows[0].row.grammar
    deadline_s = time.monotonic() + HANG_S
    while len(grammar.more) < 2 and time.monotonic() < deadline_s:
        step(service, *rows)
        service.rows.wait(0.01)
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
    while service.rows.num_repairs:  # a process in place of the dead one may be on its way
        service.rows.wait(HANG_S)
    service.prepare(StructuredOutput("regex", "another"))
    wait_until(lambda: sum(map(is_alive, pids)) == 1)
    assert len(grammar.workers) == 1
    service.close()


def test_a_process_that_comes_after_the_rows_have_ended_ends_with_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = WorkerLimits(more_processes=1, idle=0, slow_s=0.0, slow_answers=1)
    service, may_come, pids = make_service(limits), threading.Event(), list[int]()
    rows = [Follower(service, LETTERS, seed) for seed in range(2)]
    compiled = service.rows._repair._revive

    def late(given: FollowedGrammar) -> GrammarWorker:
        worker = compiled(given)
        pids.append(worker.pid)
        may_come.wait(HANG_S)
        return worker

    monkeypatch.setattr(service.rows._repair, "_revive", late)
    while not pids:
        step(service, *rows)
        service.rows.wait(0.01)
    for each in rows:
        service.close_row(each.row)
    service.prepare(StructuredOutput("regex", "another"))
    may_come.set()
    while service.rows.num_repairs:
        service.rows.wait(HANG_S)
    service.prepare(StructuredOutput("regex", "yet another"))
    wait_until(lambda: not is_alive(pids[0]))
    service.close()
