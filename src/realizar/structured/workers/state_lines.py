"""`StateLines`: lines of the shared memory for the known states of grammars' processes. Standard library only."""

from __future__ import annotations

import threading

from realizar.structured.regex_states import MOST_STATES

NO_LINES = -1
"""In place of a first line."""


class StateLines:
    """Gives each process that wants them MOST_STATES lines that no other has, as long as some are free. Thread-safe."""

    def __init__(self, count: int) -> None:
        self._free = list(range(0, count, MOST_STATES))
        self._lock = threading.Lock()

    def take(self) -> int:
        """The first of a process's lines, or NO_LINES."""
        with self._lock:
            return self._free.pop() if self._free else NO_LINES

    def give_back(self, first: int) -> None:
        """The process has ended."""
        if first != NO_LINES:
            with self._lock:
                self._free.append(first)
