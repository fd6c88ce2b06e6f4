"""The team of threads that walk a program together, the calling thread among them.

Workers stay in compiled code from walk to walk, without the interpreter's lock: a decode step follows the last within
some hundred microseconds, and workers that had to take the lock one after another would come to it late. A worker spins
for a moment, then offers its processor between looks, and when nothing has come for a while parks on a lock until it is
called. Parking is a flag that both sides exchange atomically, so no call is lost.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
from numba import njit, types

from realizar.backends.cpu.kernel import kernel
from realizar.backends.cpu.memory import read_i64
from realizar.backends.cpu.records import address, aligned_zeros
from realizar.backends.cpu.walker import (
    LINE_BYTES,
    atomic_add,
    atomic_exchange,
    atomic_load,
    atomic_store,
    sync_words,
    walk,
    walk_all,
    yield_processor,
)
from realizar.errors import StepError

_JOB, _OPERATIONS, _COUNT, _STOP = 0, 1, 2, 3  # int64 words of the job record
_SPINS, _YIELDS = 20_000, 4_000  # looks for a job: some tens of microseconds, then milliseconds
_PARKED, _CALLED = 0, 8  # bytes in a worker's line: 1 while it parks, 1 once its lock must be released


@njit
def _wait_for_job(job: int, seen: int) -> int:
    """The job number once it differs from `seen`, or `seen` after a while."""
    for look in range(_SPINS + _YIELDS):
        number = atomic_load(job)
        if number != seen:
            return number
        if look >= _SPINS:
            yield_processor()
    return seen


@kernel(signature=types.int64(*[types.int64] * 5))
def work(job: int, seen: int, sync: int, thread: int, threads: int) -> int:
    """Do all jobs after number `seen`, until none comes for a while or the team stops; returns its number."""
    while True:
        number = _wait_for_job(job, seen)
        if number == seen or read_i64(job, _STOP) != 0:
            return number
        seen = number
        walk_all(read_i64(job, _OPERATIONS), read_i64(job, _COUNT), sync, thread, threads)


@kernel(signature=types.int64(*[types.int64] * 3))
def announce(job: int, lines: int, threads: int) -> int:
    """Make the job record the next job. Returns how many workers are parked, each marked as called."""
    atomic_add(job, 1)
    parked = 0
    for index in range(1, threads):
        line = lines + index * LINE_BYTES
        if atomic_exchange(line + _PARKED, 0) != 0:
            atomic_store(line + _CALLED, 1)
            parked += 1
    return parked


@kernel(signature=types.int64(*[types.int64] * 2))
def exchange(address: int, value: int) -> int:
    """Write a word; returns what it was."""
    return atomic_exchange(address, value)


TEAM_KERNELS = (walk, work, announce, exchange)


class ThreadTeam:
    """Threads, the calling one included, at least 1. `run` returns when all have finished."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._sync = aligned_zeros(sync_words(size), np.int64)
        self._job: Any = aligned_zeros(LINE_BYTES // 8, np.int64)
        self._lines = aligned_zeros(size * LINE_BYTES // 8, np.int64)
        self._at = address(self._sync), address(self._job), address(self._lines)
        self._faults = KernelFaults()
        self._locks = [threading.Semaphore(0) for _ in range(size)]
        self._workers = [
            threading.Thread(target=self._work, args=(index,), name=f"realizar-cpu-{index}", daemon=True)
            for index in range(1, size)
        ]
        for worker in self._workers:
            worker.start()

    def run(self, operations: int, count: int) -> None:
        """Walk `count` operations on every thread; StepError where a kernel raised: all have gone on to the end."""
        self._faults.watch_thread()  # before each walk: another team may have walked on this thread
        if self.size > 1:
            self._job[_OPERATIONS], self._job[_COUNT] = operations, count
            self._call()
        walk.call(operations, count, self._at[0], 0, self.size)
        faults = self._faults.take()
        if faults:
            first = faults[0]
            text = " ".join(str(first).split())
            raise StepError(f"a kernel failed: {type(first).__name__}{f': {text}' if text else ''}") from first

    def close(self) -> None:
        if self._workers:
            self._job[_STOP] = 1
            self._call()
            for worker in self._workers:
                worker.join()
            self._workers = []

    def _call(self) -> None:
        _, job, lines = self._at
        if announce.call(job, lines, self.size):
            for index in range(1, self.size):
                if exchange.call(lines + index * LINE_BYTES + _CALLED, 0):
                    self._locks[index].release()

    def _work(self, index: int) -> None:
        sync, job, lines = self._at
        seen = 0
        self._faults.watch_thread()
        while True:
            seen = work.call(job, seen, sync, index, self.size)
            if self._job[_STOP]:
                self._faults.forget_thread()
                return
            self._park(lines + index * LINE_BYTES + _PARKED, index, seen)

    def _park(self, flag: int, index: int, seen: int) -> None:
        exchange.call(flag, 1)
        if int(self._job[_JOB]) != seen and exchange.call(flag, 0):
            return
        self._locks[index].acquire()  # the caller took the flag, or will: it releases


# `KernelFaults`: exceptions that compiled kernels raise in a walk, on any of its threads.
#
# A kernel is a C function without a result: an exception in it ends its call on that thread, and Numba hands it to
# `sys.unraisablehook`, which prints it and goes on. Here a hook in its place keeps those of threads that walk, for
# the walk to raise; all others go on to the hook before. A kernel that fails still meets the others at the barrier
# after it.

_NUMBA = "<numba."  # how Numba names what raised: its context, as text

_walking: dict[int, list[BaseException]] = {}  # by the walking thread: where its exceptions go
_installing = threading.Lock()


class KernelFaults:
    """The exceptions of one team's walks, in the order in which they came."""

    def __init__(self) -> None:
        self._found: list[BaseException] = []
        _install()

    def watch_thread(self) -> None:
        """Keep what kernels raise on the calling thread, until it watches for another team."""
        _walking[threading.get_ident()] = self._found

    def forget_thread(self) -> None:
        _walking.pop(threading.get_ident(), None)

    def take(self) -> list[BaseException]:
        found = self._found[:]
        del self._found[: len(found)]
        return found


def _install() -> None:
    """Install the hook once. It passes errors that no walk raised on to the hook before it."""
    with _installing:
        before = sys.unraisablehook
        if getattr(before, "keeps_kernel_faults", False):
            return

        def keep(unraisable: Any) -> None:
            found = _walking.get(threading.get_ident())
            of_kernel = isinstance(unraisable.object, str) and unraisable.object.startswith(_NUMBA)
            if found is None or not of_kernel or unraisable.exc_value is None:
                before(unraisable)
            else:
                found.append(unraisable.exc_value.with_traceback(None))

        keep.keeps_kernel_faults = True  # type: ignore[attr-defined]
        sys.unraisablehook = keep
