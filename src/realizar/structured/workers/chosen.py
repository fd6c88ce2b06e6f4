"""`ChosenTokens`: what rows have chosen since their process was last told. numpy only."""

from __future__ import annotations

from realizar.structured.workers.cells import Cells
from realizar.structured.workers.foreseen import ForeseenMasks
from realizar.structured.workers.mask_memory import MOST_TOKENS


class ChosenTokens:
    """Takes in the choices of rows, and names them with their next question.

    Attributes:
        outputs: all chosen ids of each row, by slot; see `FollowedRow.output`.
    """

    def __init__(self, cells: Cells, foreseen: ForeseenMasks) -> None:
        self._cells, self._foreseen = cells, foreseen
        self.outputs: list[list[int]] = [[] for _ in range(len(cells.asked))]

    def take_in(self, slot: int, token_ids: list[int]) -> None:
        """Take in the choices of one row."""
        cells = self._cells
        self.outputs[slot] += token_ids
        new = cells.num_new[slot]
        is_first = not new and cells.is_answered(slot)
        for token_id in token_ids:
            self._foreseen.take_in(slot, token_id, is_first=is_first)
            is_first = False
        cells.num_new[slot] = new = new + len(token_ids)
        if new > MOST_TOKENS or cells.unasked[slot]:
            cells.stale[slot] = cells.need_care[slot] = True

    def name(self, slot: int) -> None:
        """Let the row's next question name what was chosen since the last one."""
        cells = self._cells
        cells.num_tokens[slot] = new = cells.num_new[slot]
        for place, token_id in enumerate(self.outputs[slot][-new:] if new else ()):
            cells.tokens[slot, place] = token_id
        cells.num_new[slot] = 0
