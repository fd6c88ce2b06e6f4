"""`PrefetchedMasks`: the masks of rows that need no request, as what may follow is known already. numpy only."""

from __future__ import annotations

from collections.abc import Sequence

from realizar.structured.regex_states import MOST_STATES
from realizar.structured.workers.mask_memory import MaskMemory

NO_LINE = -1


class PrefetchedMasks:
    """Rows whose next token is certain, and rows in a known state of their grammar.

    What a worker has written is only looked up within the bounds of the memory: a wrong state can spoil its
    own rows alone. Rows are looked at one by one, by their slot: an operation of numpy costs more than a few of them.
    """

    def __init__(self, memory: MaskMemory) -> None:
        self._memory = memory
        self._lines = [NO_LINE] * memory.num_slots  # of the states of rows, by slot
        self._places, self._after = memory.places.data, memory.after.data
        self._num_states = len(memory.after)

    def is_known(self, slot: int) -> bool:
        """True for a row in a known state; `MaskMemory.places` says where its mask is."""
        return self._lines[slot] != NO_LINE

    def forget(self, slot: int) -> None:
        """Take the state of a row for unknown."""
        self._lines[slot], self._places[slot] = NO_LINE, slot

    def begin(self, slot: int, others: Sequence[int]) -> None:
        """Take a row without output to the first state of its grammar, if other rows of it are in known states."""
        for other in others:
            if (line := self._lines[other]) != NO_LINE:
                self._enter(slot, line - line % MOST_STATES)
                return

    def take_in(self, slot: int, token_id: int, *, is_first: bool) -> None:
        """Follow a row by one token.

        Args:
            is_first: its last answer was for this token.
        """
        if not self._num_states:
            return
        line = self._lines[slot]
        if line == NO_LINE:
            line = self._memory.known_line(slot) if is_first else NO_LINE
            if line == NO_LINE:
                return
        state = self._after[line, token_id]
        if 0 <= state < MOST_STATES:
            self._enter(slot, line - line % MOST_STATES + state)
        else:
            self.forget(slot)

    def write_certain(self, slot: int, num_new: int) -> bool:
        """Write the mask of a row if its next token is certain, and was the one before; True if so.

        Args:
            num_new: tokens since the last answer.
        """
        if not num_new:
            return False
        before, following = (self._memory.forced_token(slot, place) for place in (num_new - 1, num_new))
        if before < 0 or following < 0:
            return False
        mask = self._memory.masks[slot]
        mask[:] = 0  # a row may have been in a known state before
        mask[following >> 5] = 1 << (following & 31)
        return True

    def certain_ids(self, slot: int, num_new: int, most: int) -> tuple[int, ...]:
        """The tokens, `most` at the most, that are certain to come next. Args: num_new: as of `write_certain`."""
        found = list[int]()
        while len(found) < most and (token_id := self._memory.forced_token(slot, num_new + len(found))) >= 0:
            found.append(token_id)
        return tuple(found)

    def _enter(self, slot: int, line: int) -> None:
        self._lines[slot], self._places[slot] = line, self._memory.num_slots + line
