"""`Plan`: a step that is being composed."""

from __future__ import annotations

from realizar.batch import OpenedRow
from realizar.scheduler.pace import Pace
from realizar.scheduler.sequence import Sequence


class Plan:
    """The tokens of each sequence, drafts included, and the remaining budget.

    Args:
        budget: tokens of the step. max_rows: sequences of the step.
        pace: bounds what is read beside decodes; None reads what fits.
    """

    def __init__(self, budget: int, pace: Pace | None = None, max_rows: int | None = None) -> None:
        self.budget = budget
        self._max_rows = max_rows
        self._pace = pace
        self._num_decode_tokens: int | None = None
        self.tokens: dict[Sequence, int] = {}
        self.drafts: dict[Sequence, tuple[int, ...]] = {}
        self.opened: list[OpenedRow] = []

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens.values())

    @property
    def is_full(self) -> bool:
        """True if no further sequence may join."""
        return self.budget == 0 or len(self.tokens) == self._max_rows

    def most_of(self, sequence: Sequence) -> int:
        """Tokens that a prompt may take while others wait: half of the remaining budget, so that none waits long."""
        return min(sequence.num_remaining_tokens, -(-self.budget // 2))

    def start_prompts(self, position: int) -> None:
        """Limit the budget for prompts, now that all decodes are in, to what keeps the decodes' pace.

        Args:
            position: computed tokens of the prompt that is farthest.
        """
        self._num_decode_tokens = self.num_tokens
        self._limit(position, 0)

    def go_farther(self, position: int) -> None:
        """Limit the budget, to at least one, for a prompt with `position` cached tokens: later tokens are slower."""
        if self._num_decode_tokens is not None:
            self._limit(position, 1)

    def _limit(self, position: int, least: int) -> None:
        if self._pace is None or self._num_decode_tokens is None:
            return
        most = self._pace.prompt_tokens(self._num_decode_tokens, position)
        if most is not None:
            self.budget = min(self.budget, max(most - (self.num_tokens - self._num_decode_tokens), least))

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
