"""`GrammarDrafts`: tokens that a grammar forces are a row's drafts, before any that another drafter proposes."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListOf

from realizar.scheduler.drafts import Drafter
from realizar.scheduler.sequence import Sequence


class GrammarDrafts:
    """A `Drafter` on top of another one. What a grammar forces is right in any case, and is verified all the same.

    Args:
        certain_ids: the next tokens of a row that its grammar forces, so many at the most.
        drafter: asked for all other rows.
    """

    def __init__(self, certain_ids: Callable[[int, int], tuple[int, ...]], drafter: Drafter) -> None:
        self._certain_ids, self._drafter = certain_ids, drafter
        self.awaits_results = drafter.awaits_results
        self._forced: set[int] = set()  # ids of sequences whose drafts the grammar has forced

    def propose(self, sequences: ListOf[Sequence]) -> list[tuple[int, ...]]:
        forced = [self._certain_ids(sequence.own_row, sequence.max_drafts) for sequence in sequences]
        others = [sequence for sequence, drafts in zip(sequences, forced, strict=True) if not drafts]
        self._forced = {one.sequence_id for one, drafts in zip(sequences, forced, strict=True) if drafts}
        proposed = iter(self._drafter.propose(others) if others else ())
        return [drafts or next(proposed) for drafts in forced]

    def verified(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        if sequence.sequence_id not in self._forced:
            self._drafter.verified(sequence, num_drafts, num_accepted)

    def forget(self, sequence_id: int) -> None:
        self._drafter.forget(sequence_id)
