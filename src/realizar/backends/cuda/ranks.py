"""`RankSums`: sums of the ranks of a model, each of which computes on a device of its own. torch."""

from __future__ import annotations

from typing import Protocol

import torch

from realizar.backends.cuda.kernels.reduce import HALF_FACTOR
from realizar.models.spec import ModelSpec


class RankGroup(Protocol):
    """All ranks of a model; each makes the same calls, on the stream of its steps."""

    def add_up(self, values: torch.Tensor) -> None:
        """values = the sum of all ranks' values, the same bits on all."""

    def gather(self, own: torch.Tensor, all_values: torch.Tensor) -> None:
        """all_values [ranks, ...] = each rank's own."""


class RankSums:
    """What a step's matmuls leave as parts of sums, added up over their splits and then over ranks.

    `tokens` and `selected` are those of the largest step.
    """

    def __init__(self, group: RankGroup, spec: ModelSpec, tokens: int, selected: int, device: torch.device) -> None:
        ranks = spec.share.ranks
        self._group, self._spec = group, spec
        self._totals = torch.zeros((2, tokens, spec.hidden_size), device=device)
        self._own = torch.zeros((selected, -(-spec.vocab_size // ranks)), device=device)
        self._parts = torch.zeros((ranks, *self._own.shape), device=device)
        self._logits = torch.zeros((selected, ranks * self._own.shape[1]), device=device)

    def totals(self, place: int, tokens: int) -> torch.Tensor:
        """float32 [1, tokens, hidden_size]: what `add_up` made, at one of two places."""
        return self._totals[place, None, :tokens]

    def add_up(self, place: int, partials: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Of float32 [splits, tokens, hidden_size], or float16 of `HALF_FACTOR`; one rank alone has the bias."""
        total = self._totals[place, : partials.shape[1]]
        _finish(partials, bias, total)
        self._group.add_up(total)

    def add_up_stream(self, hidden: torch.Tensor) -> None:
        """Of embeddings, float32 [tokens, hidden_size], of which each is zeros on all ranks but one."""
        self._group.add_up(hidden)

    def side_by_side(self, partials: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """From the sums of this rank's ids, float32 [splits, tokens, ids], those of all: [1, tokens, vocab_size]."""
        _, tokens, ids = partials.shape
        own = self._own[:tokens]
        _finish(partials, bias, own[:, :ids])
        parts = self._parts[:, :tokens].contiguous()
        self._group.gather(own, parts)
        logits = self._logits[:tokens]
        logits.view(tokens, len(parts), -1).copy_(parts.transpose(0, 1))
        return logits[None, :, : self._spec.vocab_size]


def _finish(partials: torch.Tensor, bias: torch.Tensor | None, total: torch.Tensor) -> None:
    if partials.dtype == torch.float16:
        total.copy_(partials.float().sum(0).mul_(HALF_FACTOR.value))
    else:
        torch.sum(partials, 0, out=total) if total.is_contiguous() else total.copy_(partials.sum(0))
    if bias is not None:
        total.add_(bias)
