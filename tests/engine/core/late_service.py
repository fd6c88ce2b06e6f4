"""`LateService`: a service of grammars whose masks come as late as a test says."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from grammar_services import LastingService
from realizar.structured.workers.grammar_rows import GrammarRow
from structured.grammar_engines import GRAMMAR_TOKENS


class LateService(LastingService):
    """Shows masks only after they were waited for some more times: the first of a row at once, later ones late."""

    def __init__(self) -> None:
        super().__init__(GRAMMAR_TOKENS)
        self.lateness: Callable[[GrammarRow], int] = lambda _row: 0
        self._hidden: dict[int, int] = {}
        rows = self.rows
        self._ask, self._wait, self._are_done = rows.ask, rows.wait, rows.are_done
        rows.ask, rows.wait, rows.are_done = self.ask, self.wait, self.are_done  # type: ignore[method-assign]
        self._are_all_there = rows.are_all_there
        rows.are_all_there = self.are_all_there  # type: ignore[method-assign]

    def ask(self, slots: NDArray[np.intp], drafts: Mapping[int, tuple[int, ...]]) -> None:
        self._ask(slots, drafts)
        while not self._are_done(slots).all():
            self._wait(1.0)
        for slot in slots.tolist():
            self._hidden[slot] = self.lateness(self.rows._rows[slot])

    def wait(self, timeout_s: float) -> None:
        self._hidden = {slot: left - 1 for slot, left in self._hidden.items() if left > 1}
        self._wait(0)

    def are_all_there(self, slots: NDArray[np.intp]) -> bool:
        return bool(self.are_done(slots).all()) and self._are_all_there(slots)

    def are_done(self, slots: NDArray[np.intp]) -> NDArray[np.bool_]:
        hidden = [self._hidden.get(slot, 0) > 0 for slot in slots.tolist()]
        return self._are_done(slots) & ~np.array(hidden, np.bool_)
