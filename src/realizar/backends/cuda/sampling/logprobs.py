"""Log-probabilities of the model's own distribution, reduced on the device, read later. torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.logprob_columns import LogprobColumns


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Results on their way to the host; of the most probable ids each row wants `top_n`.

    `lines` are float64 [rows, 3 + 2 * most]: id, rank, log-probability, the most probable ids, theirs.
    """

    top_n: Sequence[int] | NDArray[np.integer[Any]]
    lines: torch.Tensor

    def groups(self) -> list[tuple[NDArray[np.intp], LogprobColumns, NDArray[np.bool_]]]:
        """Rows that list equally many ids, intp [some], their columns, and true for rows whose numbers can be used.

        The copy must be done.
        """
        lines, counts = self.lines.numpy(), np.asarray(self.top_n, np.intp)
        if len(counts) and counts.min() == counts.max():
            every = np.arange(len(counts))
            return [(every, _columns(lines, int(counts[0])), ~np.isnan(lines[:, 2]))]
        groups = [(counts == count).nonzero()[0] for count in np.unique(counts)]
        return [(rows, _columns(lines[rows], int(counts[rows[0]])), ~np.isnan(lines[rows, 2])) for rows in groups]


def _columns(lines: NDArray[np.float64], count: int) -> LogprobColumns:
    most = (lines.shape[1] - 3) // 2
    ids, values = np.empty((len(lines), 1 + count), np.int32), np.empty((len(lines), 1 + count))
    with np.errstate(invalid="ignore"):  # a row that could not sample has no number that means anything
        ids[:, 0], ids[:, 1:] = lines[:, 0], lines[:, 3 : 3 + count]
        ranks = lines[:, 1].astype(np.int32)
    values[:, 0], values[:, 1:] = lines[:, 2], lines[:, 3 + most : 3 + most + count]
    return LogprobColumns(1 + count, ids.tobytes(), values.tobytes(), ranks.tobytes())


def start_logprobs(
    logits: torch.Tensor, token_id: torch.Tensor, top_n: int, copy: Callable[[torch.Tensor], torch.Tensor]
) -> PendingLogprobs:
    """Begin to compute log-probabilities of a token's logits, float32 [1, vocab], as the model gave them.

    They are of the id in `token_id`, int64 [1], and of the `top_n` most probable ones; `copy` starts copies.
    """
    device, vocab = logits.device, logits.shape[1]
    ids, most = token_id.clamp(0, vocab - 1), min(vocab, top_n)
    top = logits.max(dim=1, keepdim=True).values
    normaliser = top[:, 0].double() + torch.exp(logits - top).sum(dim=1, dtype=torch.float64).log()
    value = logits.gather(1, ids[:, None])
    places = torch.arange(vocab, device=device)[None, :]
    ranks = 1 + (logits > value).sum(dim=1) + ((logits == value) & (places < ids[:, None])).sum(dim=1)
    top_ids = largest_ordered(logits, most)
    top_values = logits.gather(1, top_ids).double() - normaliser[:, None]
    columns = ids[:, None], ranks[:, None], value.double() - normaliser[:, None], top_ids, top_values
    return PendingLogprobs([most], copy(torch.cat([column.double() for column in columns], dim=1)))


def largest_ordered(logits: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [rows, count]: the ids of the largest logits, best first, equal ones by lower id."""
    bits = logits.contiguous().view(torch.int32).long()
    bits = torch.where(logits == 0.0, 0, bits)  # -0 equals 0
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    keys = (ordered << 32) | (0xFFFFFFFF - torch.arange(logits.shape[1], device=logits.device))
    return 0xFFFFFFFF - (torch.topk(keys, count, dim=1).values & 0xFFFFFFFF)
