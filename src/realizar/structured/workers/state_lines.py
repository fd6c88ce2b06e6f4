"""`StateLines`: lines of the shared memory for the known states of grammars. Standard library only."""

from __future__ import annotations

import threading
from collections.abc import Hashable

from realizar.structured.regex_states import MOST_STATES

NO_LINES = -1
"""In place of a first line."""


class StateLines:
    """Gives each grammar MOST_STATES lines that no other has, as long as some are free. Thread-safe.

    All processes of a grammar share them: the masks that a step sends are then few, and lie together.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(0, count, MOST_STATES))
        self._taken: dict[Hashable, tuple[int, int]] = {}  # by grammar, the first line and the number of processes
        self._lock = threading.Lock()

    def take(self, grammar: Hashable) -> int:
        """The first of a grammar's lines for one more of its processes, or NO_LINES."""
        with self._lock:
            first, count = self._taken.get(grammar, (NO_LINES, 0))
            if not count:
                if not self._free:
                    return NO_LINES
                first = self._free.pop()
            self._taken[grammar] = first, count + 1
            return first

    def give_back(self, grammar: Hashable) -> None:
        """A process that had taken them has ended; the lines of its last process are free."""
        with self._lock:
            first, count = self._taken.pop(grammar)
            if count > 1:
                self._taken[grammar] = first, count - 1
            else:
                self._free.append(first)
