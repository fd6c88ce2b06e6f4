"""Open requests have a bounded number of grammars by processes and memory, with a share for each client."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from realizar.errors import QueueFullError, RealizarError
from realizar.sampling_params import StructuredOutput
from realizar.structured.workers.service import KnownGrammar, KnownGrammars
from realizar.structured.workers.worker import Worker, WorkerLimits
from structured.grammar_followers import (
    DIGITS,
    ENDLESS,
    LETTERS,
    PATIENT,
    Follower,
    make_service,
    step,
)
from waits import HANG_S, is_alive, wait_until


def test_grammars_of_closed_requests_are_ended() -> None:
    """The only client of a grammar leaves while it is compiled: the next one's turn comes, and its process is gone."""
    service = make_service(PATIENT)
    heard: list[RealizarError | None] = []
    ticket = service.prepare_later(ENDLESS, "a", heard.append)
    job = service._queue._jobs[ENDLESS]
    wait_until(lambda: job.stop is not None)
    worker = getattr(job.stop, "__self__", None)
    assert isinstance(worker, Worker)
    wait_until(lambda: worker.pid is not None)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)  # it won't come to an end by itself
    service.cancel(ticket)
    service.prepare(LETTERS, "b")
    wait_until(lambda: not is_alive(worker.pid))
    assert not heard
    assert not service.known.has(ENDLESS)
    service.close()


def test_a_client_with_many_grammars_does_not_hold_up_another() -> None:
    """Grammars of two clients are compiled in turns, whoever came first."""
    service = make_service(replace(PATIENT, compilers=1))
    order: list[str] = []
    done = threading.Event()

    def note(name: str) -> Callable[[RealizarError | None], None]:
        def heard(error: RealizarError | None) -> None:
            assert error is None
            order.append(name)
            if len(order) == 5:
                done.set()

        return heard

    first = service.prepare_later(ENDLESS, "many", note("endless"))
    for number in range(4):
        service.prepare_later(StructuredOutput("regex", f"many{number}"), "many", note(f"many{number}"))
    service.prepare_later(StructuredOutput("regex", "one"), "one", note("one"))
    service.cancel(first)
    assert done.wait(HANG_S)
    assert "one" in order[:2]
    service.close()


def test_open_requests_bound_the_processes() -> None:
    service = make_service(WorkerLimits(grammars=2, idle=1))
    open_ids = {"a", "b"}
    for name, structured in (("a", LETTERS), ("b", DIGITS)):
        service.prepare(structured)
        assert service.known.acquire(name, structured, open_ids.__contains__)
    third = StructuredOutput("regex", "third")
    with pytest.raises(QueueFullError, match="2 different grammars"):
        service.prepare(third)
    open_ids.remove("a")
    assert service.known.acquire("b", DIGITS, open_ids.__contains__)
    service.prepare(third)
    assert not service.known.has(LETTERS)
    assert service.known.usage()[0] == 2
    open_ids.clear()
    assert service.known.acquire("c", third, open_ids.__contains__)
    for number in range(4):
        service.prepare(StructuredOutput("regex", f"idle{number}"))
    assert service.known.usage()[0] <= 2
    assert service.known.has(third)
    service.close()


def test_a_client_has_a_share_of_the_processes() -> None:
    """It may have as many as others leave it then: one that holds half of all is refused, and others are not."""
    service = make_service(WorkerLimits(grammars=4, idle=1))
    open_ids: set[str] = set()

    def ask(client: str, text: str) -> None:
        structured = StructuredOutput("regex", text)
        service.prepare(structured, client)
        open_ids.add(text)
        assert service.known.acquire(text, structured, open_ids.__contains__, client)

    ask("a", "first")
    ask("a", "second")
    with pytest.raises(QueueFullError, match="share"):
        ask("a", "third")
    ask("b", "fourth")
    with pytest.raises(QueueFullError, match="share"):
        ask("b", "fifth")
    ask("", "sixth")  # the process's own user: all that is left
    service.close()


def test_a_client_has_a_share_of_the_memory() -> None:
    service = make_service()
    service.prepare(LETTERS, "a")
    assert service.known.acquire("a", LETTERS, {"a"}.__contains__, "a")
    _, size_bytes = service.known.usage()
    service._limits = service.known._limits = WorkerLimits(total_bytes=2 * size_bytes)
    with pytest.raises(QueueFullError, match="share"):
        service.prepare(DIGITS, "a")
    service.prepare(DIGITS, "b")
    service.close()


def test_open_requests_bound_the_memory() -> None:
    service = make_service(WorkerLimits(total_bytes=1))
    service.prepare(LETTERS)
    open_ids = {"a"}
    assert service.known.acquire("a", LETTERS, open_ids.__contains__)
    row = Follower(service, LETTERS)
    step(service, row)
    assert service.known.usage()[1] > 1000
    with pytest.raises(QueueFullError, match="memory"):
        service.prepare(DIGITS)
    service.close_row(row.row)
    open_ids.clear()
    assert not service.known.acquire("b", DIGITS, open_ids.__contains__)
    service.prepare(DIGITS)
    assert not service.known.has(LETTERS)
    service.close()


def test_a_grammar_that_was_compiled_twice_is_dropped_once() -> None:
    """A request is cancelled as its grammar is done, and the next one asks for it again."""
    dropped: list[KnownGrammar] = []
    known, twice = KnownGrammars(WorkerLimits(grammars=4), dropped.append), StructuredOutput("regex", "a")
    first, second = KnownGrammar(twice), KnownGrammar(twice)
    for each in (first, second):
        known.add(each)
    assert known.usage()[0] == 2
    known.drop_surplus()
    assert dropped == [first]
    known.drop_surplus(num_coming=3)
    assert dropped == [first, second]
