"""A grammar that can't be compiled or followed is the request's fault or the machine's, and is refused for a time."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from realizar.errors import InvalidRequestError, QueueFullError, RequestFailedError
from realizar.sampling_params import StructuredOutput
from realizar.structured.grammar_tokens import GrammarTokens
from realizar.structured.workers.grammar_rows import GrammarRow
from realizar.structured.workers.messages import FromWorker
from realizar.structured.workers.service import GrammarService
from realizar.structured.workers.worker import ServerError, Worker, WorkerFactory, WorkerLimits
from structured.deadly_server import COMMAND, DEADLY
from structured.grammar_followers import advance, served_masks
from structured.grammar_walks import CONTROL, END, TOKENS
from waits import wait_until

LETTERS = StructuredOutput("regex", "[a-f]{3,40}x")
MINUTES_S = 600.0


class Clock:
    """Seconds that pass when a test says so."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(clock: Clock) -> Iterator[GrammarService]:
    limits = WorkerLimits(step_s=0.5, stall_s=0.5)
    tokens = GrammarTokens(TOKENS, (CONTROL,), (END,), len(TOKENS))
    made = GrammarService(tokens, limits=limits, clock=clock, server_command=COMMAND)
    yield made
    made.close()


def start(service: GrammarService, structured: StructuredOutput = LETTERS) -> GrammarRow:
    """A row after its first mask."""
    service.prepare(structured)
    row = service.open_row(structured, ())
    assert served_masks(service, [(row, ())])[0].any()
    assert row.error is None
    return row


def test_a_compile_that_the_clock_ends_is_forgotten(
    service: GrammarService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processor time was not used up: the machine may have been too busy for it."""
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "compile", _stopped)
        with pytest.raises(RequestFailedError, match=r"compiling it took longer than 0\.1 s"):
            service.prepare(LETTERS)
    clock.now_s += MINUTES_S - 1
    with pytest.raises(RequestFailedError, match=r"compiling it took longer than 0\.1 s"):
        service.prepare(LETTERS)
    with pytest.raises(RequestFailedError):
        service.known.acquire("a", LETTERS, lambda _id: True)
    late = service.open_row(LETTERS, ())
    assert (late.error is not None, late.cause) == (True, "engine")
    clock.now_s += 1
    start(service)
    assert not service.known._refusals


@pytest.mark.parametrize("status", [-signal.SIGXCPU, -signal.SIGSEGV])
def test_a_grammar_that_is_at_fault_stays_refused(
    service: GrammarService, clock: Clock, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """One that uses up its processor time, or crashes twice."""

    compile_it = Worker.compile

    def ends(worker: Worker, *arguments: Any) -> FromWorker:
        _signal(worker, -status)
        return compile_it(worker, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "compile", ends)
        with pytest.raises(InvalidRequestError, match="can't be honoured: compiling it"):
            service.prepare(LETTERS)
    clock.now_s += 1e9
    with pytest.raises(InvalidRequestError, match="can't be honoured: compiling it"):
        service.prepare(LETTERS)


def _signal(worker: Worker, number: int) -> None:
    wait_until(lambda: worker.pid is not None)
    assert worker.pid is not None
    os.kill(worker.pid, number)


_compile = Worker.compile


def _stopped(worker: Worker, number: int, structured: StructuredOutput, cpu_s: int, _limit_s: float) -> FromWorker:
    """A process that gets no time of the processor."""
    _signal(worker, signal.SIGSTOP)
    return _compile(worker, number, structured, cpu_s, 0.1)


def test_a_row_that_the_clock_ends_is_not_the_requests_fault(service: GrammarService, clock: Clock) -> None:
    hangs = StructuredOutput("regex", "[a-f]{3,40}x|hang")
    row = start(service, hangs)
    advance(service, row, (DEADLY,))
    served_masks(service, [(row, ())])
    assert (row.error, row.cause) == ("following it took longer than 0.5 s", "engine")
    with pytest.raises(RequestFailedError, match="following it took longer"):
        service.prepare(hangs)
    clock.now_s += MINUTES_S
    start(service, hangs)


def test_a_row_that_crashes_its_worker_twice_is_the_requests_fault(service: GrammarService, clock: Clock) -> None:
    crashes = StructuredOutput("regex", "[a-f]{3,40}x|crash")
    row = start(service, crashes)
    advance(service, row, (DEADLY,))
    served_masks(service, [(row, ())])
    assert (row.error, row.cause) == ("following it crashed (SIGSEGV)", "request")
    clock.now_s += 1e9
    with pytest.raises(InvalidRequestError, match="following it crashed"):
        service.prepare(crashes)


def test_one_crash_is_no_proof_against_a_grammar(service: GrammarService, clock: Clock) -> None:
    """One of the two deaths had another cause: what is short of time or memory ends any process."""
    crashes = StructuredOutput("regex", "[a-f]{3,40}x|crash")
    row = start(service, crashes)
    advance(service, row, (DEADLY,))
    row.died_at, row.died_of = len(row.output), "engine"
    served_masks(service, [(row, ())])
    assert (row.error, row.cause) == ("following it crashed (SIGSEGV)", "engine")
    clock.now_s += MINUTES_S
    start(service, crashes)


def test_a_fork_that_is_refused_is_not_the_requests_fault(
    service: GrammarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is remembered against the grammar either."""
    row = start(service)
    assert row.worker is not None
    _signal(row.worker, signal.SIGKILL)
    while service._pool.workers:
        service.rows.wait(0.01)

    def refuses(*_: object, **_may_wait: bool) -> NoReturn:
        raise ServerError("no more processes")

    with monkeypatch.context() as patch:
        patch.setattr(WorkerFactory, "new", refuses)
        served_masks(service, [(row, ())])
    assert (row.error, row.cause) == ("it can't be compiled again: no more processes", "engine")
    service.close_row(row)
    service.known.forget(LETTERS)  # as the engine does
    start(service)


def test_without_descriptors_there_is_no_process_for_now(
    service: GrammarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of other grammars go on: it is a process that can't be started, and no fault of the program."""
    beside = start(service)

    def no_pair() -> NoReturn:
        raise OSError(24, "Too many open files")

    other = StructuredOutput("regex", "other")
    with monkeypatch.context() as patch:
        patch.setattr(service, "_idle", [])
        patch.setattr(socket, "socketpair", no_pair)
        with pytest.raises(QueueFullError, match="Too many open files"):
            service.prepare(other)
    service.prepare(other)
    assert served_masks(service, [(beside, ())])[0].any()


def test_a_fault_of_the_program_is_not_the_requests(service: GrammarService, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> NoReturn:
        raise KeyError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "compile", fails)
        with pytest.raises(RequestFailedError, match="can't be compiled: KeyError"):
            service.prepare(LETTERS)
    start(service)
