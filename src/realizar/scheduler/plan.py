"""`Plan`: a step in the making."""

from __future__ import annotations

from realizar.batch import OpenedRow
from realizar.scheduler.sequence import Sequence


class Plan:
    """Tokens per sequence, drafts among them, and the budget left.

    Args:
        budget: tokens of the step.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.tokens: dict[Sequence, int] = {}
        self.drafts: dict[Sequence, tuple[int, ...]] = {}
        self.opened: list[OpenedRow] = []

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens.values())

    @property
    def share(self) -> int:
        """Tokens that a prompt may take while others may want some: half of what is left, so that none waits long."""
        return -(-self.budget // 2)

    def add(self, sequence: Sequence, count: int, drafts: tuple[int, ...] = ()) -> None:
        """Schedule `count` tokens in all, of which the drafts are the last."""
        self.budget += self.tokens.get(sequence, 0) - count
        self.tokens[sequence] = count
        if drafts:
            self.drafts[sequence] = drafts

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out again."""
        self.budget += self.tokens.pop(sequence, 0)
        self.drafts.pop(sequence, None)
