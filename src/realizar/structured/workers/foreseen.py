"""`ForeseenMasks`: the masks of rows that need no question, as what may follow is known already. numpy only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from realizar.structured.regex_states import MOST_STATES
from realizar.structured.workers.mask_memory import MaskMemory

_NO_LINE = -1

Slots = NDArray[np.intp]


class ForeseenMasks:
    """Rows whose next token is certain, and rows in a known state of their grammar.

    What a grammar's process has written is only looked up within the bounds of the memory: a wrong state can spoil its
    own rows alone.
    """

    def __init__(self, memory: MaskMemory) -> None:
        self._memory = memory
        self._lines = np.full(memory.num_slots, _NO_LINE, np.intp)  # of the states of rows, by slot

    def are_known(self, slots: Slots) -> NDArray[np.bool_]:
        """bool [rows], rows in a known state; `MaskMemory.places` says where their masks are."""
        known: NDArray[np.bool_] = self._lines[slots] != _NO_LINE
        return known

    def forget(self, slots: Slots | int) -> None:
        """Take the states of rows for unknown."""
        self._lines[slots], self._memory.places[slots] = _NO_LINE, slots

    def begin(self, slot: int, others: Sequence[int]) -> None:
        """Take a row without output to the first state of its grammar, if other rows of it are in known states."""
        lines = self._lines[np.array(others, np.intp)]
        if (known := lines[lines != _NO_LINE]).size:
            first = int(known[0]) // MOST_STATES * MOST_STATES
            self._lines[slot], self._memory.places[slot] = first, self._memory.num_slots + first

    def take_in(self, slots: Slots, token_ids: NDArray[np.int32], are_first: NDArray[np.bool_]) -> None:
        """Follow rows by one token each.

        Args:
            token_ids: int32 [rows]. are_first: bool [rows], rows whose last answer was for this token.
        """
        memory = self._memory
        if not len(memory.after):
            return
        lines = self._lines[slots]
        if (unknown := lines == _NO_LINE).any():
            lines = np.where(are_first & unknown, memory.find_known(slots), lines)
        known = (lines != _NO_LINE).nonzero()[0]
        following = np.full(len(slots), _NO_LINE)
        if len(known):
            before = lines[known]
            state = memory.after[before, token_ids[known]].astype(np.intp)
            is_one = (state >= 0) & (state < MOST_STATES)
            following[known] = np.where(is_one, before - before % MOST_STATES + state, _NO_LINE)
        self._lines[slots] = following
        memory.places[slots] = np.where(following != _NO_LINE, memory.num_slots + following, slots)

    def write_certain(self, slots: Slots, num_new: NDArray[np.int32], may: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Write the masks of rows whose next token is certain, and was the one before; bool [rows], those rows.

        Args:
            num_new: int32 [rows], tokens since the last answers. may: bool [rows], those to look at.
        """
        memory = self._memory
        before, following = memory.find_forced(slots, np.maximum(num_new - 1, 0)), memory.find_forced(slots, num_new)
        found: NDArray[np.bool_] = may & (num_new > 0) & (before >= 0) & (following >= 0)
        if found.any():
            slots, before, following = slots[found], before[found], following[found]
            memory.masks[slots, before >> 5] = 0
            memory.masks[slots, following >> 5] = np.uint32(1) << (following & 31).astype(np.uint32)
        return found
