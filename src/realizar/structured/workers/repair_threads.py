"""`RepairThreads` replace and add grammars' processes in the background; a descriptor reports when one is done."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias

from realizar.structured.workers.worker import GrammarWorker

_MOST = 4  # grammars whose dead processes are replaced at a time

Repaired: TypeAlias = Future[GrammarWorker | None]
"""A process for a grammar, or None, or the fault of the program that kept it from coming."""


class RepairThreads:
    """Started with the first repair."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._done, self._report_done = os.pipe()
        os.set_blocking(self._done, False)

    def fileno(self) -> int:
        """The descriptor that can be read once a repair is done; see `take_in`."""
        return self._done

    def run(self, repair: Callable[[], GrammarWorker | None]) -> Repaired:
        """Run a repair on a thread."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_MOST, "realizar-masks")
        repaired = self._threads.submit(repair)
        repaired.add_done_callback(lambda _repaired: os.write(self._report_done, b"r"))
        return repaired

    def take_in(self) -> None:
        """Note that all repairs were looked at that are done."""
        os.read(self._done, 1 << 12)

    def close(self) -> None:
        """Wait for all repairs, and end the threads. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        if self._done >= 0:
            os.close(self._done)
            os.close(self._report_done)
            self._done = self._report_done = -1
