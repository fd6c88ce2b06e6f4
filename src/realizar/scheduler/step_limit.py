"""`StepLimit`: the size of steps while the device is short of memory."""

from __future__ import annotations

_LEAST_TOKENS = 16  # a step of one sequence is not cut below this: its request fails
_STEPS_TO_GROW = 64  # steps in a row that must have fitted before larger ones are tried


class StepLimit:
    """Halved when a step did not fit into memory, and doubled again after many that did.

    Attributes:
        rows: sequences in one step. tokens: tokens in one step.
        is_short: a step did not fit lately; each step is then awaited before the next, to know which one fails.
    """

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self._most = max_rows, max_tokens
        self.rows, self.tokens = self._most
        self._num_fitting = 0
        self.is_short = False

    def failed(self, num_steps: int, num_rows: int, num_tokens: int) -> bool:
        """Halve the limits after one of the steps in flight did not fit; False if it was alone and can't be smaller.

        Args:
            num_rows, num_tokens: of the largest.
        """
        self._num_fitting = 0
        if num_steps == 1 and num_rows <= 1 and num_tokens <= _LEAST_TOKENS:
            return False
        self.is_short = True
        self.rows = max(num_rows // 2, 1)
        self.tokens = max(num_tokens // 2, self.rows, min(_LEAST_TOKENS, self._most[1]))
        return True

    def fitted(self) -> None:
        """Take in a step that fitted."""
        if not self.is_short:
            return
        self._num_fitting += 1
        if self._num_fitting == _STEPS_TO_GROW:
            self._num_fitting = 0
            self.is_short = (self.rows, self.tokens) != self._most
            self.rows, self.tokens = min(2 * self.rows, self._most[0]), min(2 * self.tokens, self._most[1])
