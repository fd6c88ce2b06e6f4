"""Grammars that wait to be compiled: whose turn it is, what is compiled once, what not at all."""

from __future__ import annotations

import pytest

from realizar.errors import EngineDeadError, QueueFullError, RealizarError
from realizar.sampling_params import StructuredOutput
from realizar.structured.workers.compile_queue import CompileJob, CompileQueue, Ticket


class Waiting:
    """Puts tickets into a queue and notes their results."""

    def __init__(self, most_per_client: int = 10) -> None:
        self.queue = CompileQueue(most_per_client)
        self.heard: list[tuple[str, str, RealizarError | None]] = []

    def put(self, client: str, value: str) -> Ticket:
        ticket = Ticket(
            StructuredOutput("regex", value), client, lambda error: self.heard.append((client, value, error))
        )
        self.queue.put(ticket)
        return ticket

    def take(self) -> CompileJob:
        job = self.queue.take()
        assert job is not None
        return job

    def run(self, count: int) -> list[str]:
        """Take and finish so many."""
        values = []
        for _ in range(count):
            job = self.take()
            values.append(job.structured.value)
            self.queue.finish(job, None)
        return values


def test_clients_take_turns() -> None:
    """A client with many queued grammars waits for a client with one."""
    waiting = Waiting()
    for value in ("a1", "a2", "a3"):
        waiting.put("a", value)
    waiting.put("b", "b1")
    assert waiting.run(2) == ["a1", "b1"]
    waiting.put("c", "c1")
    waiting.put("b", "b2")
    assert waiting.run(4) == ["a2", "c1", "b2", "a3"]
    assert [client for client, _, _ in waiting.heard] == ["a", "b", "a", "c", "b", "a"]


def test_what_several_wait_for_is_compiled_once() -> None:
    waiting = Waiting()
    waiting.put("a", "same")
    waiting.put("b", "other")
    waiting.put("b", "same")
    job = waiting.take()
    waiting.put("c", "same")  # while it is being compiled
    waiting.queue.finish(job, None)
    assert sorted(waiting.heard, key=str) == [("a", "same", None), ("b", "same", None), ("c", "same", None)]
    waiting.put("d", "last")
    assert waiting.run(2) == ["other", "last"]


def test_what_is_being_compiled_is_taken_once() -> None:
    """Others go on beside it."""
    waiting = Waiting()
    waiting.put("a", "same")
    job = waiting.take()
    waiting.put("b", "same")
    waiting.put("b", "other")
    assert waiting.run(1) == ["other"]
    waiting.queue.finish(job, None)
    assert waiting.heard == [("b", "other", None), ("a", "same", None), ("b", "same", None)]


def test_grammars_of_closed_requests_are_not_compiled() -> None:
    waiting = Waiting()
    left, stays = waiting.put("a", "left"), waiting.put("b", "wanted")
    waiting.queue.cancel(left)
    waiting.queue.cancel(left)
    both = waiting.put("a", "wanted")
    waiting.queue.cancel(both)
    assert waiting.run(1) == ["wanted"]
    assert waiting.heard == [("b", "wanted", None)]
    waiting.queue.cancel(stays)


def test_a_running_job_is_stopped_when_its_last_client_aborts() -> None:
    waiting = Waiting()
    first, second = waiting.put("a", "x"), waiting.put("b", "x")
    job, stops = waiting.take(), []
    job.stop = lambda: stops.append("stopped")
    waiting.queue.cancel(first)
    assert not stops
    assert job.tickets
    waiting.queue.cancel(second)
    assert stops == ["stopped"]
    assert not job.tickets
    waiting.put("c", "x")  # has nothing to do with what was stopped
    waiting.queue.finish(job, None)
    assert not waiting.heard
    assert waiting.run(1) == ["x"]
    assert waiting.heard == [("c", "x", None)]


def test_a_client_may_queue_so_many() -> None:
    waiting = Waiting(most_per_client=2)
    waiting.put("a", "1")
    waiting.put("a", "2")
    with pytest.raises(QueueFullError, match="limit 2"):
        waiting.put("a", "3")
    waiting.put("b", "1")
    assert waiting.run(2) == ["1", "2"]
    waiting.put("a", "3")
    assert waiting.run(1) == ["3"]


def test_a_closed_queue_refuses_what_waits() -> None:
    waiting = Waiting()
    waiting.put("a", "1")
    job = waiting.take()
    stops: list[str] = []
    job.stop = lambda: stops.append("stopped")
    waiting.put("a", "2")
    waiting.queue.close()
    assert stops == ["stopped"]
    assert waiting.queue.take() is None
    assert [type(error) for _, _, error in waiting.heard] == [EngineDeadError] * 2
    with pytest.raises(EngineDeadError, match="closed"):
        waiting.put("b", "3")
