"""`KeptMasks`: lines of masks that the engine's process keeps for later rows. numpy only.

Rows at the same place of their schema have the same mask. Many places share one too, so that a line holds the mask of
all of them: of 13,000 places of six schemas it took 1,700. Processes of grammars do not see these lines.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from realizar.structured.json_steps import JsonState

NO_LINE = -1


class KeptMasks:
    """A mask is kept until its line is needed for another, which no row reads and which none has read lately.

    Args:
        lines: uint32 [lines, words], written while no step that has been given its masks is in flight.
    """

    def __init__(self, lines: NDArray[np.uint32]) -> None:
        self._lines = lines
        self._by_content: dict[int, int] = {}
        self._contents = [0] * len(lines)
        self._stamps = [0] * len(lines)  # so often each line was written
        self._readers = [0] * len(lines)  # rows that are at it
        self._is_recent = bytearray(len(lines))
        self._next = 0

    def find(self, state: JsonState) -> int:
        """The line of a state's mask, or NO_LINE."""
        line = state.line
        return line if line != NO_LINE and self._stamps[line] == state.stamp else NO_LINE

    def enter(self, line: int) -> None:
        """A row reads a line from now on."""
        self._readers[line] += 1
        self._is_recent[line] = 1

    def leave(self, line: int) -> None:
        """A row does so no more."""
        self._readers[line] -= 1

    def keep(self, state: JsonState, mask: NDArray[np.uint32]) -> None:
        """Keep the mask of a state, uint32 [words], unless that may not be another row's, or all lines are read."""
        if not len(self._lines) or not state.place.is_known:
            return
        content = hash(mask.tobytes())
        line = self._by_content.get(content, NO_LINE)
        if line == NO_LINE or not np.array_equal(self._lines[line], mask):
            if (line := self._free_line()) == NO_LINE:
                return
            if self._by_content.get(self._contents[line]) == line:
                del self._by_content[self._contents[line]]
            self._stamps[line] += 1
            self._by_content[content], self._contents[line] = line, content
            self._lines[line] = mask
        state.line, state.stamp = line, self._stamps[line]

    def _free_line(self) -> int:
        """The next line that no row reads, and that none has read since the last look; NO_LINE if all are read."""
        for _ in range(2 * len(self._lines)):
            line = self._next
            self._next = (line + 1) % len(self._lines)
            if not self._readers[line]:
                if not self._is_recent[line]:
                    return line
                self._is_recent[line] = 0
        return NO_LINE
