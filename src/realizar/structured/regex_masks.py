"""`RegexMasks`: masks of one regular expression by state, so that each is computed once. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence

from realizar.structured.regex_parse import UnreadableError, parse
from realizar.structured.regex_states import ExpressionTable, StatesLostError
from realizar.structured.state_masks import StateMasks

_MOST_STEPS = 50_000  # from a state with a token to the next state


class RegexMasks(StateMasks[int]):
    """Masks by state, for all rows of the expression.

    Attributes:
        table: numbers the expression's states.

    Args:
        token_bytes: text of each id.
    """

    def __init__(self, table: ExpressionTable, start: int, token_bytes: Sequence[bytes]) -> None:
        super().__init__(start)
        self.table, self._token_bytes = table, token_bytes
        self._steps: dict[tuple[int, int], int] = {}

    def after(self, state: int | None, token_id: int) -> int | None:
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


def regex_masks(pattern: str, token_bytes: Sequence[bytes]) -> RegexMasks | None:
    """Masks of an expression; None where it has something that is not followed here."""
    table = ExpressionTable()
    try:
        return RegexMasks(table, parse(pattern, table), token_bytes)
    except (UnreadableError, StatesLostError, RecursionError):
        return None
