"""`Patience`: how long a step waits for masks that are late, before their rows are deferred. Standard library only."""

from __future__ import annotations

_WEIGHT = 0.1  # of the last step in the mean
_FIRST_S = 0.01
_LONGEST_S = 0.1  # a step that reads a long prompt says nothing about the others
_MOST_S = 0.25  # for the rows of a step that are all late: meanwhile nobody is added and nobody leaves


class Patience:
    """Weighs what waiting costs all rows of a step against what it costs the late ones to be deferred.

    A row that is deferred loses a step, and a moment of waiting costs each row that moment. So a step waits for the
    late rows' share of its time: waiting costs at most twice what the better choice would have. Where all rows are
    late, only requests that come or leave are to be served.
    """

    def __init__(self) -> None:
        self._step_s = _FIRST_S
        self._last_s: float | None = None

    def note(self, now_s: float, *, is_idle: bool = False) -> None:
        """A step has its masks at `now_s`, on any steady clock.

        Where `is_idle`, it goes on without any: how long it took says nothing about the others.
        """
        if self._last_s is not None and not is_idle:
            self._step_s += _WEIGHT * (min(now_s - self._last_s, _LONGEST_S) - self._step_s)
        self._last_s = now_s

    def left_s(self, waited_s: float, num_late: int, num_rows: int) -> float:
        """Seconds that the step still waits, having waited `waited_s`; below 0 if that was enough."""
        return (_MOST_S if num_late == num_rows else self._step_s * num_late / num_rows) - waited_s
