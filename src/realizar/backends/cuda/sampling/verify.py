"""Drafts beside the choices made at their places: all rows of a step at once, on the device. torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from realizar.batch import ScheduledRow

NOT_REACHED = -2  # in place of a choice after a draft that was not chosen


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """The drafts of a step's rows, and where the step's choices lie among `[rows, 1 + drafts]`.

    Rows are those that choose. A row with fewer drafts than another has places that no choice belongs to.

    Attributes:
        ids: int64 [rows, drafts], -1 where a row has fewer.
        rows, places: int64 [choices], of each choice.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(cls, rows: Sequence[ScheduledRow], ends: Sequence[int], token_ids: torch.Tensor) -> StepDrafts:
        """The drafts of rows that choose.

        Args:
            ends: index in the step of the token after each row's last.
            token_ids: int32 [tokens] of the step, on the device, where drafts may be all that knows them.
        """
        device, most = token_ids.device, max(row.num_drafts for row in rows)
        counts = [row.num_drafts for row in rows]
        where = [
            [end - count + place if place < count else -1 for place in range(most)]
            for end, count in zip(ends, counts, strict=True)
        ]
        tokens = torch.tensor(where, device=device)
        choices = [(index, place) for index, count in enumerate(counts) for place in range(count + 1)]
        lying = torch.tensor(choices, device=device)
        ids = torch.where(tokens < 0, -1, token_ids[tokens.clamp(min=0)].long())
        return cls(ids, lying[:, 0], lying[:, 1])

    def verify(self, choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compare choices with drafts: a choice stands as long as every draft before it is what was chosen there.

        Args:
            choices: int32 [choices], below 0 where none could be made.

        Returns:
            int32 [rows, 1 + drafts], NOT_REACHED where no choice stands, and bool of the same shape, where one does.
        """
        count, most = self.ids.shape
        table = torch.full((count, most + 1), NOT_REACHED, dtype=torch.int32, device=choices.device)
        table[self.rows, self.places] = choices
        right = (table[:, :most] == self.ids) & (self.ids >= 0)
        stands = torch.cat([torch.ones_like(table[:, :1]), right.int().cumprod(dim=1)], dim=1).bool()
        return torch.where(stands, table, NOT_REACHED), stands
