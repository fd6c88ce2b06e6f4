"""A grammar that can't be compiled or followed is the request's fault or the machine's, and is refused for a time."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from typing import NoReturn

import pytest

from realizar.errors import InvalidRequestError, QueueFullError, RequestFailedError
from realizar.sampling_params import StructuredOutput
from realizar.structured.grammar_tokens import GrammarTokens
from realizar.structured.workers.channel import ChannelError, ChannelTimeoutError
from realizar.structured.workers.followed import FollowedRow
from realizar.structured.workers.server_handle import ServerError
from realizar.structured.workers.service import GrammarService
from realizar.structured.workers.worker import GrammarWorker
from structured.grammar_walks import CONTROL, END, TOKENS

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
    made = GrammarService(GrammarTokens(TOKENS, (CONTROL,), (END,), len(TOKENS)), clock=clock)
    yield made
    made.close()


def never(*_: object) -> NoReturn:
    raise ChannelTimeoutError("it does not answer")


def start(service: GrammarService) -> FollowedRow:
    """A row after its first mask."""
    service.prepare(LETTERS)
    row = service.open_row(LETTERS, ())
    assert service.masks([(row, ())])[0].any()
    assert row.error is None
    return row


def test_a_compile_that_the_clock_ends_is_forgotten(
    service: GrammarService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processor time was not used up: the machine may have been too busy for it."""
    with monkeypatch.context() as patch:
        patch.setattr(GrammarWorker, "_answer", never)
        with pytest.raises(RequestFailedError, match="compiling it took longer than 60 s"):
            service.prepare(LETTERS)
    clock.now_s += MINUTES_S - 1
    with pytest.raises(RequestFailedError, match="compiling it took longer than 60 s"):
        service.prepare(LETTERS)
    with pytest.raises(RequestFailedError):
        service.hold("a", LETTERS, lambda _id: True)
    late = service.open_row(LETTERS, ())
    assert (late.error is not None, late.cause) == (True, "engine")
    clock.now_s += 1
    start(service)
    assert service._known._refused_characters == 0


@pytest.mark.parametrize("status", [-signal.SIGXCPU, -signal.SIGSEGV])
def test_a_grammar_that_is_at_fault_stays_refused(
    service: GrammarService, clock: Clock, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """One that uses up its processor time, or crashes twice."""

    def ends(worker: GrammarWorker, *_: object) -> NoReturn:
        os.kill(worker.pid, -status)
        raise ChannelError("it has ended")

    with monkeypatch.context() as patch:
        patch.setattr(GrammarWorker, "_answer", ends)
        patch.setattr(GrammarWorker, "kill", _reap_only)
        with pytest.raises(InvalidRequestError, match="can't be honoured: compiling it"):
            service.prepare(LETTERS)
    clock.now_s += 1e9
    with pytest.raises(InvalidRequestError, match="can't be honoured: compiling it"):
        service.prepare(LETTERS)


def _reap_only(worker: GrammarWorker) -> int | None:
    """`GrammarWorker.kill` of a process that is ending by itself: no other signal may come first."""
    with worker._lock:
        worker._reaped = True
        return worker._server.reap(worker.pid)


def test_a_row_that_the_clock_ends_is_not_the_requests_fault(
    service: GrammarService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = start(service)
    assert row.worker is not None
    os.kill(row.worker.pid, signal.SIGKILL)
    with monkeypatch.context() as patch:
        patch.setattr(GrammarWorker, "follow", _late)
        service.masks([(row, ())])
    assert row.error is not None
    assert "took longer" in row.error
    assert row.cause == "engine"
    with pytest.raises(RequestFailedError, match="following it took longer"):
        service.prepare(LETTERS)
    clock.now_s += MINUTES_S
    start(service)


def _late(worker: GrammarWorker, *_: object) -> NoReturn:
    raise worker.late(10.0)


def test_a_row_that_crashes_its_process_twice_is_the_requests_fault(
    service: GrammarService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = start(service)
    assert row.worker is not None
    os.kill(row.worker.pid, signal.SIGKILL)
    with monkeypatch.context() as patch:
        patch.setattr(GrammarWorker, "follow", _crashed)
        service.masks([(row, ())])
    assert (row.error, row.cause) == ("following it crashed (SIGKILL)", "request")
    clock.now_s += 1e9
    with pytest.raises(InvalidRequestError, match="following it crashed"):
        service.prepare(LETTERS)


def _crashed(worker: GrammarWorker, *_: object) -> NoReturn:
    os.kill(worker.pid, signal.SIGKILL)
    raise worker._death(ChannelError("it has ended"), 10.0)


def test_one_crash_is_no_proof_against_a_grammar(
    service: GrammarService, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its grammar was forgotten, so that there was no process before: what is short of memory ends any process."""
    service.prepare(LETTERS)
    service.forget(LETTERS)
    row = service.open_row(LETTERS, ())
    with monkeypatch.context() as patch:
        patch.setattr(GrammarWorker, "follow", _crashed)
        service.masks([(row, ())])
    assert (row.error, row.cause) == ("following it crashed (SIGKILL)", "engine")
    clock.now_s += MINUTES_S
    start(service)


def test_a_fork_that_is_refused_is_not_the_requests_fault(
    service: GrammarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is remembered against the grammar either."""
    row = start(service)
    assert row.worker is not None
    os.kill(row.worker.pid, signal.SIGKILL)

    def refuses(*_: object) -> NoReturn:
        raise ServerError("no more processes")

    with monkeypatch.context() as patch:
        patch.setattr(GrammarService, "_new_worker", refuses)
        service.masks([(row, ())])
    assert (row.error, row.cause) == ("it can't be compiled again: no more processes", "engine")
    service.close_row(row)
    service.forget(LETTERS)  # as the engine does
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
        patch.setattr(socket, "socketpair", no_pair)
        with pytest.raises(QueueFullError, match="Too many open files"):
            service.prepare(other)
    service.prepare(other)
    assert service.masks([(beside, ())])[0].any()


def test_a_fault_of_the_program_is_not_the_requests(service: GrammarService, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> NoReturn:
        raise KeyError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(GrammarWorker, "compile", fails)
        with pytest.raises(RequestFailedError, match="can't be compiled: KeyError"):
            service.prepare(LETTERS)
    start(service)
