"""`Cells`: what is known of the rows that follow grammars, cell by cell. numpy only."""

from __future__ import annotations

from dataclasses import dataclass

from realizar.structured.workers.mask_memory import MaskMemory


@dataclass(frozen=True, slots=True)
class Cells:
    """Columns of `MaskMemory` and `StepMasks`, by slot: an operation of numpy costs more than some rows by themselves.

    Attributes:
        asked, answered, states, tokens, num_tokens, num_drafts: of `MaskMemory`.
        unasked: rows whose question is not there yet. failed: rows with an error.
        need_care: rows whose process may have to change. stale: rows whose process lacks tokens.
        num_new: tokens since the last question.
    """

    asked: memoryview[int]
    answered: memoryview[int]
    states: memoryview[int]
    tokens: memoryview[int]
    num_tokens: memoryview[int]
    num_drafts: memoryview[int]
    unasked: memoryview[int]
    failed: memoryview[int]
    need_care: memoryview[int]
    stale: memoryview[int]
    num_new: memoryview[int]

    @classmethod
    def of(cls, memory: MaskMemory, *own: memoryview[int]) -> Cells:
        """The columns of the memory, and those of `StepMasks` from `unasked` on."""
        shared = (memory.asked, memory.answered, memory.states, memory.tokens, memory.num_tokens, memory.num_drafts)
        return cls(*(column.data for column in shared), *own)

    def is_answered(self, slot: int) -> bool:
        """True if the row's last question is answered, and none of it is left to be asked."""
        return self.asked[slot] == self.answered[slot] and not self.unasked[slot]

    def is_in_use(self, slot: int) -> bool:
        """True if a process may write to the slot."""
        return self.asked[slot] != self.answered[slot]

    def is_reported(self, slot: int) -> bool:
        """True if the row's process has reported all of it up to the tokens since then."""
        return self.is_answered(slot) and not self.stale[slot] and not self.failed[slot]
