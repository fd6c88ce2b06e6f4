"""Log-probabilities of the model's own distribution, reduced on the device, read later. torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from realizar.outputs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class LogprobsAsked:
    """The log-probabilities that a row asks for: of `target` (None: of the most probable id), and of the top ids."""

    target: int | None
    top_n: int


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Results on their way to the host.

    Attributes:
        top_n: of each row, how many of the most probable ids are wanted.
        lines: float64 [rows, 3 + 2 * most]: id, rank, log-probability, the most probable ids, theirs.
    """

    top_n: Sequence[int]
    lines: torch.Tensor

    def read(self) -> list[TokenLogprobs]:
        """The log-probabilities of each row. The copy must be done."""
        lines = self.lines.numpy()
        most = (lines.shape[1] - 3) // 2
        with np.errstate(invalid="ignore"):  # nothing was written beyond a row's own list
            ids = lines[:, [0, 1, *range(3, 3 + most)]].astype(np.int64).tolist()
        values = lines[:, [2, *range(3 + most, 3 + 2 * most)]].tolist()
        return [
            TokenLogprobs(token_id, value, rank, tuple(zip(top_ids[:count], tops[:count], strict=True)))
            for count, (token_id, rank, *top_ids), (value, *tops) in zip(self.top_n, ids, values, strict=True)
        ]


def start_logprobs(logits: torch.Tensor, asked: Sequence[LogprobsAsked], chosen: torch.Tensor) -> PendingLogprobs:
    """Begin to compute log-probabilities.

    Args:
        logits: float32 [rows, vocab], as the model gave them.
        chosen: int64 [rows]: the id that a row without a target reports.
    """
    device, vocab = logits.device, logits.shape[1]
    targets = torch.tensor([-1 if a.target is None else a.target for a in asked], device=device)
    ids = torch.where(targets < 0, chosen, targets).clamp(0, vocab - 1)
    top = logits.max(dim=1, keepdim=True).values
    normaliser = top[:, 0].double() + torch.exp(logits - top).sum(dim=1, dtype=torch.float64).log()
    value = logits.gather(1, ids[:, None])
    places = torch.arange(vocab, device=device)[None, :]
    ranks = 1 + (logits > value).sum(dim=1) + ((logits == value) & (places < ids[:, None])).sum(dim=1)
    most = min(vocab, max((a.top_n for a in asked), default=0))
    top_ids = largest_ordered(logits, most)
    top_values = logits.gather(1, top_ids).double() - normaliser[:, None]
    columns = ids[:, None], ranks[:, None], value.double() - normaliser[:, None], top_ids, top_values
    lines = torch.cat([column.double() for column in columns], dim=1)
    return PendingLogprobs([min(each.top_n, most) for each in asked], lines.to("cpu", non_blocking=True))


def largest_ordered(logits: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [rows, count]: the ids of the largest logits, best first, equal ones by lower id."""
    bits = logits.contiguous().view(torch.int32).long()
    bits = torch.where(logits == 0.0, 0, bits)  # -0 equals 0
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    keys = (ordered << 32) | (0xFFFFFFFF - torch.arange(logits.shape[1], device=logits.device))
    return 0xFFFFFFFF - (torch.topk(keys, count, dim=1).values & 0xFFFFFFFF)
