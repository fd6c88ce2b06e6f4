"""`RegexMasks`: masks of one regular expression by state, so that each is computed once. numpy only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from realizar.structured.regex_parse import UnreadableError, parse
from realizar.structured.regex_states import ExpressionTable, StatesLostError

_MOST_BYTES = 16 << 20  # of masks; those used longest ago are dropped first
_MOST_STEPS = 50_000  # from a state with a token to the next state


class RegexMasks:
    """Masks by state, for all rows of the expression.

    Attributes:
        table, start: the expression.

    Args:
        token_bytes: text of each id.
    """

    def __init__(self, table: ExpressionTable, start: int, token_bytes: Sequence[bytes]) -> None:
        self.table, self._token_bytes = table, token_bytes
        self.start = start
        self._steps: dict[tuple[int, int], int] = {}
        self._masks: OrderedDict[int, NDArray[np.uint32]] = OrderedDict()

    def after(self, state: int | None, token_id: int) -> int | None:
        """The state after one more token; None if it is not known."""
        if state is None:
            return None
        found = self._steps.get((state, token_id))
        if found is None:
            try:
                found = self.table.after(state, self._token_bytes[token_id])
            except (StatesLostError, RecursionError):
                return None
            if len(self._steps) < _MOST_STEPS:
                self._steps[state, token_id] = found
        return found

    def find(self, state: int | None) -> NDArray[np.uint32] | None:
        """The mask of a state, uint32 [words]; None if it has not been computed yet."""
        if state is None or state not in self._masks:
            return None
        self._masks.move_to_end(state)
        return self._masks[state]

    def keep(self, state: int | None, mask: NDArray[np.uint32]) -> None:
        """Keep a state's mask for other rows."""
        if state is not None:
            self._masks[state] = mask.copy()
            if len(self._masks) * mask.nbytes > _MOST_BYTES:
                self._masks.popitem(last=False)


def regex_masks(pattern: str, token_bytes: Sequence[bytes]) -> RegexMasks | None:
    """Masks of an expression; None where it has something that is not followed here."""
    table = ExpressionTable()
    try:
        return RegexMasks(table, parse(pattern, table), token_bytes)
    except (UnreadableError, StatesLostError, RecursionError):
        return None
