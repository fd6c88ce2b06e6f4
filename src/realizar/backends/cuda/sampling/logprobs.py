"""Log-probabilities of the model's own distribution, reduced on the device, read later. torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        ids, ranks: int64 [rows]. values: float64 [rows].
        top_ids: int64 [rows, most]. top_values: float64 [rows, most].
    """

    asked: tuple[LogprobsAsked, ...]
    ids: torch.Tensor
    ranks: torch.Tensor
    values: torch.Tensor
    top_ids: torch.Tensor
    top_values: torch.Tensor

    def read(self) -> list[TokenLogprobs]:
        """The log-probabilities of each row. The copies must be done."""
        columns = (t.tolist() for t in (self.ids, self.values, self.ranks, self.top_ids, self.top_values))
        return [
            TokenLogprobs(token_id, value, rank, tuple(zip(top_ids[: asked.top_n], tops[: asked.top_n], strict=True)))
            for asked, token_id, value, rank, top_ids, tops in zip(self.asked, *columns, strict=True)
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
    results = ids, ranks, value[:, 0].double() - normaliser, top_ids, top_values
    return PendingLogprobs(tuple(asked), *(result.to("cpu", non_blocking=True) for result in results))


def largest_ordered(logits: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [rows, count]: the ids of the largest logits, best first, equal ones by lower id."""
    bits = logits.contiguous().view(torch.int32).long()
    bits = torch.where(logits == 0.0, 0, bits)  # -0 equals 0
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    keys = (ordered << 32) | (0xFFFFFFFF - torch.arange(logits.shape[1], device=logits.device))
    return 0xFFFFFFFF - (torch.topk(keys, count, dim=1).values & 0xFFFFFFFF)
