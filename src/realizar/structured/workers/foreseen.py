"""`ForeseenMasks`: the masks of rows that need no question, as what may follow is known already. numpy only."""

from __future__ import annotations

from collections.abc import Sequence

from realizar.structured.json_steps import JsonState, JsonSteps
from realizar.structured.regex_states import MOST_STATES
from realizar.structured.workers.kept_masks import NO_LINE, KeptMasks
from realizar.structured.workers.mask_memory import MaskMemory


class ForeseenMasks:
    """Rows whose next token is certain, rows in a known state of their grammar, and rows at a known place of a schema.

    What a grammar's process has written is only looked up within the bounds of the memory: a wrong state can spoil its
    own rows alone, and a wrong mask those of its schema. Rows are looked at one by one, by their slot: an operation of
    numpy costs more than a few of them.
    """

    def __init__(self, memory: MaskMemory) -> None:
        self._memory = memory
        self._lines = [NO_LINE] * memory.num_slots  # of the states or places of rows, by slot
        self._places, self._after = memory.places.data, memory.after.data
        self._num_states = len(memory.after)
        self._kept = KeptMasks(memory.masks[memory.num_slots + self._num_states :])
        self._steps: list[JsonSteps | None] = [None] * memory.num_slots
        self._states: list[JsonState | None] = [None] * memory.num_slots  # of rows of a schema with places

    def is_known(self, slot: int) -> bool:
        """True for a row in a known state or place; `MaskMemory.places` says where its mask is."""
        return self._lines[slot] != NO_LINE

    def has_place(self, slot: int) -> bool:
        """True for a row that is followed by its place in a schema."""
        return self._states[slot] is not None

    def forget(self, slot: int) -> None:
        """Take the state or place of a row for unknown."""
        self._leave(slot)
        self._states[slot] = self._steps[slot] = None

    def begin(self, slot: int, others: Sequence[int]) -> None:
        """Take a row without output to the first state of its grammar, if other rows of it are in known states."""
        for other in others:
            if (line := self._lines[other]) != NO_LINE:
                self._enter(slot, line - line % MOST_STATES)
                return

    def begin_text(self, slot: int, steps: JsonSteps) -> None:
        """Take a row without output to the begin of its schema's texts."""
        self._steps[slot] = steps
        self._go_to(slot, steps.start)

    def take_in(self, slot: int, token_id: int, *, is_first: bool) -> None:
        """Follow a row by one token.

        Args:
            is_first: its last answer was for this token.
        """
        if (steps := self._steps[slot]) is not None and (state := self._states[slot]) is not None:
            if is_first:
                self._keep(slot)
            self._leave(slot)
            self._go_to(slot, steps.after(state, token_id))
        elif self._num_states:
            self._take_in(slot, token_id, is_first=is_first)

    def _take_in(self, slot: int, token_id: int, *, is_first: bool) -> None:
        line = self._lines[slot]
        if line == NO_LINE:
            line = self._memory.known_line(slot) if is_first else NO_LINE
            if line == NO_LINE:
                return
        state = self._after[line, token_id]
        if 0 <= state < MOST_STATES:
            self._enter(slot, line - line % MOST_STATES + state)
        else:
            self._leave(slot)

    def _keep(self, slot: int) -> None:
        """Keep the mask in a row's slot for other rows at its place, unless it is known."""
        state = self._states[slot]
        if state is not None and not self.is_known(slot):
            self._kept.keep(state, self._memory.masks[slot])

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
        mask[:] = 0  # the mask before may have been a kept one
        mask[following >> 5] = 1 << (following & 31)
        self._keep(slot)
        return True

    def certain_ids(self, slot: int, num_new: int, most: int) -> tuple[int, ...]:
        """The tokens, `most` at the most, that are certain to come next. Args: num_new: as of `write_certain`."""
        found = list[int]()
        while len(found) < most and (token_id := self._memory.forced_token(slot, num_new + len(found))) >= 0:
            found.append(token_id)
        return tuple(found)

    def _go_to(self, slot: int, state: JsonState | None) -> None:
        """Take a row to another place; None if it can't be told."""
        self._states[slot] = state
        if state is not None and (line := self._kept.find(state)) != NO_LINE:
            self._kept.enter(line)
            self._enter(slot, self._num_states + line)

    def _enter(self, slot: int, line: int) -> None:
        self._lines[slot], self._places[slot] = line, self._memory.num_slots + line

    def _leave(self, slot: int) -> None:
        line = self._lines[slot]
        if line >= self._num_states:
            self._kept.leave(line - self._num_states)
        self._lines[slot], self._places[slot] = NO_LINE, slot
