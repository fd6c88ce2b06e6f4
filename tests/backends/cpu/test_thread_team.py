"""The team of threads: every operation once per thread, in order, through parking, other processes and many walks."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from numba import cfunc, types

from realizar.backends.cpu.memory import read_i64, view
from realizar.backends.cpu.records import address, aligned_zeros
from realizar.backends.cpu.threads import ThreadTeam
from realizar.backends.cpu.walker import OPERATION_FIELDS
from waits import process

WORDS = 8  # int64 of a cache line
MOST = 4  # threads


@cfunc(types.void(types.int64, types.int64, types.int64))
def count_up(arguments: int, thread: int, threads: int) -> None:
    """Word 0 of the thread's line counts its calls; word 1 adds what it reads of all others: barriers order that."""
    lines = read_i64(arguments, 0)
    own = view(lines + thread * 64, WORDS, np.int64)
    own[0] += 1


@cfunc(types.void(types.int64, types.int64, types.int64))
def check_all(arguments: int, thread: int, threads: int) -> None:
    """Word 1 of the thread's line counts threads that are not where it is: 0 if the barrier before this one held."""
    lines = read_i64(arguments, 0)
    own = view(lines + thread * 64, WORDS, np.int64)
    for other in range(threads):
        if view(lines + other * 64, WORDS, np.int64)[0] != own[0]:
            own[1] += 1


class Program:
    """`pairs` times: all threads count, barrier, all threads compare, barrier."""

    def __init__(self, pairs: int) -> None:
        self.lines = aligned_zeros(WORDS * MOST, np.int64).reshape(MOST, WORDS)
        self.arguments = np.array([address(self.lines)], np.int64)
        self.table = aligned_zeros(2 * pairs * OPERATION_FIELDS, np.int64).reshape(-1, OPERATION_FIELDS)
        self.table[0::2] = count_up.address, address(self.arguments), 1
        self.table[1::2] = check_all.address, address(self.arguments), 1

    def run(self, team: ThreadTeam) -> None:
        team.run(address(self.table), len(self.table))

    def check(self, threads: int, calls: int) -> None:
        assert self.lines[:threads, 0].tolist() == [calls] * threads
        assert not self.lines[threads:].any()
        assert not self.lines[:, 1].any(), "a thread passed a barrier before the others came"


@pytest.fixture
def busy_processes() -> Iterator[None]:
    """Two processes that never sleep, on the same cores."""
    command = [sys.executable, "-c", "while True: pass"]
    with process(command), process(command):
        yield


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_thousands_of_short_walks(threads: int) -> None:
    team, program = ThreadTeam(threads), Program(5)
    walks = 20000 if threads <= 2 else 3000  # more threads than cores wait for the scheduler
    for _ in range(walks):
        program.run(team)
    team.close()
    program.check(threads, 5 * walks)


@pytest.mark.parametrize("threads", [2, 4])
def test_parking_between_walks(threads: int) -> None:
    """Pauses around the moment at which workers stop spinning, so that calls meet them parking."""
    team, program = ThreadTeam(threads), Program(2)
    rng = np.random.default_rng(3)
    for _ in range(300):
        program.run(team)
        time.sleep(float(rng.uniform(0, 0.006)))
    team.close()
    program.check(threads, 600)


@pytest.mark.parametrize("threads", [2, 3])
def test_progress_beside_busy_processes(threads: int, busy_processes: None) -> None:
    team, program = ThreadTeam(threads), Program(3)
    for _ in range(30):
        program.run(team)
    team.close()
    program.check(threads, 90)


def test_walks_may_come_from_different_threads() -> None:
    """An engine may load on one thread and step on another."""
    team, program = ThreadTeam(2), Program(2)
    for _ in range(20):
        caller = threading.Thread(target=program.run, args=(team,))
        caller.start()
        caller.join()
    team.close()
    program.check(2, 40)


def test_close_ends_the_workers_and_is_idempotent() -> None:
    before = set(threading.enumerate())  # threads of other tests may end meanwhile
    for parked in (False, True):
        team, program = ThreadTeam(3), Program(1)
        program.run(team)
        if parked:
            time.sleep(0.05)
        workers = set(threading.enumerate()) - before
        assert sorted(worker.name for worker in workers) == ["realizar-cpu-1", "realizar-cpu-2"]
        team.close()
        team.close()
        assert not any(worker.is_alive() for worker in workers)


def test_a_team_that_never_walked_closes() -> None:
    for threads in (1, 4):
        ThreadTeam(threads).close()
