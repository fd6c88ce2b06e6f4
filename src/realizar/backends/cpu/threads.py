"""The team of threads that walk a program together, the calling thread among them.

Workers wait for the next walk by spinning for a moment (a decode step follows the last within microseconds), then park
on a lock until they are called. Parking is a flag that both sides exchange atomically, so no call is lost.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numba import njit, types

from realizar.backends.cpu.records import address, aligned_zeros
from realizar.backends.cpu.walker import SYNC_WORDS, atomic_add, atomic_exchange, atomic_load, walk

_JOB, _OPERATIONS, _COUNT, _STOP = 0, 1, 2, 3  # int64 words of the job record
_SPINS = 20_000


@njit(types.int64(types.int64, types.int64), nogil=True, cache=True)
def wait_for_job(job: int, seen: int) -> int:
    """The job number once it differs from `seen`, or `seen` after a while."""
    for _ in range(_SPINS):
        number = atomic_load(job)
        if number != seen:
            return number
    return seen


@njit(types.int64(types.int64, types.int64), nogil=True, cache=True)
def add(address: int, value: int) -> int:
    """Add to a word; returns what it was."""
    return atomic_add(address, value)


@njit(types.int64(types.int64, types.int64), nogil=True, cache=True)
def exchange(address: int, value: int) -> int:
    """Write a word; returns what it was."""
    return atomic_exchange(address, value)


class ThreadTeam:
    """`size` threads. `run` returns when all have finished.

    Args:
        size: threads, the calling one included; at least 1.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._sync = aligned_zeros(SYNC_WORDS, np.int64)
        self._job: Any = aligned_zeros(8, np.int64)
        self._parked: Any = aligned_zeros(8 * size, np.int64)  # a cache line per worker
        self._locks = [threading.Semaphore(0) for _ in range(size)]
        self._workers = [
            threading.Thread(target=self._work, args=(index,), name=f"realizar-cpu-{index}", daemon=True)
            for index in range(1, size)
        ]
        for worker in self._workers:
            worker.start()

    def run(self, operations: int, count: int) -> None:
        """Walk `count` operations at an address on every thread."""
        if self.size > 1:
            self._job[_OPERATIONS], self._job[_COUNT] = operations, count
            self._call()
        walk(operations, count, address(self._sync), 0, self.size)

    def close(self) -> None:
        """End the workers; idempotent."""
        if self._workers:
            self._job[_STOP] = 1
            self._call()
            for worker in self._workers:
                worker.join()
            self._workers = []

    def _call(self) -> None:
        add(address(self._job), 1)
        for index in range(1, self.size):
            if exchange(self._flag(index), 0):
                self._locks[index].release()

    def _flag(self, index: int) -> int:
        return address(self._parked) + 64 * index

    def _work(self, index: int) -> None:
        job, sync, seen = address(self._job), address(self._sync), 0
        while True:
            number = wait_for_job(job, seen)
            if number == seen:
                number = self._park(index, job, seen)
            seen = number
            if self._job[_STOP]:
                return
            walk(int(self._job[_OPERATIONS]), int(self._job[_COUNT]), sync, index, self.size)

    def _park(self, index: int, job: int, seen: int) -> int:
        exchange(self._flag(index), 1)
        if int(self._job[_JOB]) != seen and exchange(self._flag(index), 0):
            return int(self._job[_JOB])
        self._locks[index].acquire()  # the caller took the flag, or will: it releases
        return int(self._job[_JOB])
