"""`RowPool`: the backend's rows. A row is not used again while a submitted step still names it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class RowPool:
    """Hands out row numbers 0 .. num_rows - 1, smallest first at the start."""

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows - 1, -1, -1))
        self._steps = np.zeros(num_rows, np.int32)
        self._draining: set[int] = set()
        self._closed: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """Take a free row; the caller has checked `num_free`."""
        return self._free.pop()

    def submitted(self, rows: NDArray[np.intp]) -> None:
        """Note that a step with these rows, intp [rows], all different, was submitted."""
        self._steps[rows] += 1

    def finished(self, rows: NDArray[np.intp]) -> None:
        """Note that a step with these rows, intp [rows], is done."""
        self._steps[rows] -= 1
        if not self._draining:
            return
        for row in rows[self._steps[rows] == 0].tolist():
            if row in self._draining:
                self._draining.remove(row)
                self._closed.append(row)

    def release(self, row: int) -> None:
        """Close a row whose sequence has ended, at once or when its steps in flight are done."""
        if self._steps[row]:
            self._draining.add(row)
        else:
            self._closed.append(row)

    def take_closed(self) -> list[int]:
        """Return the rows to close in the backend; from now on they are free."""
        closed, self._closed = self._closed, []
        self._free.extend(reversed(closed))
        return closed

    def audit(self, owned: Iterable[int]) -> None:
        """Prove that every row is free, owned, draining or closed, and only one of these.

        Args:
            owned: rows of open sequences.

        Raises:
            RuntimeError: one is lost or in two states.
        """
        rows = [*self._free, *owned, *self._draining, *self._closed]
        if sorted(rows) != list(range(len(self._steps))):
            raise RuntimeError(f"rows {sorted(rows)} are free, owned, draining or closed, of {len(self._steps)}")
        if self._steps.min() < 0:
            raise RuntimeError("a row has ended more steps than it was in")
