"""`RowPool`: the backend's rows, none of which is used again while a submitted step still names it."""

from __future__ import annotations

from collections.abc import Iterable


class RowPool:
    """Hands out row numbers 0 .. num_rows - 1, smallest first at the start."""

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows - 1, -1, -1))
        self._steps = [0] * num_rows
        self._leaving: set[int] = set()
        self._closed: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free row; the caller has seen that there is one."""
        return self._free.pop()

    def submitted(self, rows: Iterable[int]) -> None:
        """A step with these rows is on its way."""
        for row in rows:
            self._steps[row] += 1

    def finished(self, rows: Iterable[int]) -> None:
        """A step with these rows is done."""
        for row in rows:
            self._steps[row] -= 1
            if self._steps[row] == 0 and row in self._leaving:
                self._leaving.remove(row)
                self._closed.append(row)

    def release(self, row: int) -> None:
        """The row's sequence has left; the row follows once its steps are done."""
        if self._steps[row]:
            self._leaving.add(row)
        else:
            self._closed.append(row)

    def take_closed(self) -> list[int]:
        """Rows to close in the backend; from now on they are free."""
        closed, self._closed = self._closed, []
        self._free.extend(reversed(closed))
        return closed

    def audit(self, owned: Iterable[int]) -> None:
        """Prove that every row is free, owned, leaving or closed, and only one of these.

        Args:
            owned: rows of open sequences.

        Raises:
            RuntimeError: one is lost or in two states.
        """
        rows = [*self._free, *owned, *self._leaving, *self._closed]
        if sorted(rows) != list(range(len(self._steps))):
            raise RuntimeError(f"rows {sorted(rows)} are free, owned, leaving or closed, of {len(self._steps)}")
        if min(self._steps) < 0:
            raise RuntimeError("a row has ended more steps than it was in")
