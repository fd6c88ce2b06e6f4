"""`Positions`: the places of a step at which tokens are chosen, several in a row with drafts. torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Positions:
    """Places at which tokens are chosen, those of one row one after another and in order.

    A choice after drafts is made as if they had been chosen: what it depends on is known before any choice is made, so
    that all are made at once. Those after a wrong draft are dropped.

    Attributes:
        rows: number of the row of each.
        positions: index in its sequence of each token being chosen.
        places: how many of the row's drafts stand before each; empty where no row has drafts.
        drafts: int64 [positions, drafts] on the device, the drafts of each position's row, of which the first
            `places` stand before it; a place without a draft holds -1. None where no row has drafts.
        drafted: rows that have drafts.
    """

    rows: Sequence[int]
    positions: Sequence[int]
    places: Sequence[int] = ()
    drafts: torch.Tensor | None = None
    drafted: frozenset[int] = field(default_factory=frozenset)

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, first: int, end: int) -> Positions:
        """Those from index `first` to before `end`."""
        drafts = None if self.drafts is None else self.drafts[first:end]
        return Positions(self.rows[first:end], self.positions[first:end], self.places[first:end], drafts, self.drafted)

    def rows_and_places(self) -> Iterator[tuple[int, int]]:
        """Each position's row, and the drafts before it."""
        return zip(self.rows, self.places or itertools.repeat(0), strict=False)

    def place(self, index: int) -> int:
        """Drafts before one position."""
        return self.places[index] if self.places else 0

    def drafts_before(self, indices: Sequence[int], vocab_size: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Ids of drafts of some positions, int64 [indices, drafts], and a mask of those that stand before, bool.

        Ids lie within the vocabulary: what does not is said not to stand before. None where no drafts do.
        """
        if self.drafts is None or not any(self.places[index] for index in indices):
            return None
        device = self.drafts.device
        ids = self.drafts[torch.tensor(indices, device=device)]
        counts = torch.tensor([self.places[index] for index in indices], device=device)[:, None]
        before = (torch.arange(ids.shape[1], device=device) < counts) & (ids >= 0) & (ids < vocab_size)
        return torch.where(before, ids, 0), before
