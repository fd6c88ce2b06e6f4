"""`Plan`: a step that is being composed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from realizar.batch import OpenedRow
from realizar.kv_cache.manager import Prefix
from realizar.scheduler.pace import Pace
from realizar.scheduler.sequence import Sequence

_NO_ROWS = np.zeros(0, np.intp)


class Plan:
    """The tokens of each sequence, drafts included, and the remaining budget.

    Attributes:
        decodes: intp [rows], rows that decode one token each; they come before all others.
        tokens: of other sequences, in their order. drafts: of those that have any.
        restored: prefixes with snapshots that sequences start from.
        opened: rows to open with the step.

    Args:
        budget: tokens of the step. max_rows: sequences of the step.
        pace: bounds what is read beside decodes; None reads what fits.
    """

    def __init__(self, budget: int, pace: Pace | None = None, max_rows: int | None = None) -> None:
        self.budget = budget
        self._max_rows = max_rows
        self._pace = pace
        self._num_decode_tokens: int | None = None
        self.decodes: NDArray[np.intp] = _NO_ROWS
        self.tokens: dict[Sequence, int] = {}
        self.drafts: dict[Sequence, tuple[int, ...]] = {}
        self.restored: dict[Sequence, Prefix] = {}
        self.opened: list[OpenedRow] = []

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(self.tokens.values())

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + len(self.tokens)

    @property
    def is_full(self) -> bool:
        """True if no further sequence may join."""
        return self.budget == 0 or self.num_rows == self._max_rows

    @property
    def most_decodes(self) -> int:
        """Sequences of one token each that may still join."""
        return self.budget if self._max_rows is None else min(self.budget, self._max_rows - self.num_rows)

    def add_decodes(self, rows: NDArray[np.intp]) -> None:
        """Schedule one token of each row, intp [rows], before any other."""
        self.decodes = rows
        self.budget -= len(rows)

    def most_of(self, sequence: Sequence) -> int:
        """Tokens that a prompt may take while others wait: half of the remaining budget, so that none waits long."""
        return min(sequence.num_chunk_tokens, -(-self.budget // 2))

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
        others = self.decodes[self.decodes != sequence.row]
        self.budget += len(self.decodes) - len(others)
        self.decodes = others
        self.budget += self.tokens.pop(sequence, 0)
        self.drafts.pop(sequence, None)
        self.restored.pop(sequence, None)
