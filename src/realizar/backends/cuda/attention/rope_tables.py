"""Cosines and sines of every position, one table per kind of rope in the model, and how queries grow with it."""

from __future__ import annotations

import numpy as np
import torch

from realizar.models.parts import QueryGrowth, Rope
from realizar.models.spec import ModelSpec

_ROWS = 4096  # positions computed at once


class RopeTables:
    """float32 [context length, half] cosines and sines, and [context length] factors of queries.

    Angles are in float32 as the models were trained with.
    """

    def __init__(self, spec: ModelSpec, context_length: int, device: torch.device) -> None:
        ropes = {attention.rope for _, attention in spec.all_attentions() if attention.rope is not None}
        self._tables = {rope: _tables(rope, context_length, device) for rope in ropes}
        growths = {attention.query_growth for _, attention in spec.attentions() if attention.query_growth is not None}
        self._scales = {growth: _scales(growth, context_length, device) for growth in growths}
        self._none = torch.zeros(1, device=device)

    def get(self, rope: Rope | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Without rope a tensor that nothing reads."""
        return (self._none, self._none) if rope is None else self._tables[rope]

    def query_scales(self, growth: QueryGrowth | None) -> torch.Tensor:
        """Where queries do not grow a tensor that nothing reads."""
        return self._none if growth is None else self._scales[growth]


def _scales(growth: QueryGrowth, length: int, device: torch.device) -> torch.Tensor:
    """To the bit those of the CPU backend."""
    factors = 1 + growth.factor * np.log(1 + np.arange(length, dtype=np.int32) // growth.period)
    return torch.from_numpy(factors.astype(np.float32)).to(device)


def _tables(rope: Rope, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the tables on the host as the CPU backend does, so that both agree to the bit."""
    frequencies = np.array(rope.inverse_frequencies, np.float32)
    cosine, sine = (torch.empty((length, frequencies.size), device=device) for _ in range(2))
    for first in range(0, length, _ROWS):
        positions = np.arange(first, min(first + _ROWS, length), dtype=np.float32)
        angles = positions[:, None] * frequencies
        for table, values in ((cosine, np.cos(angles)), (sine, np.sin(angles))):
            table[first : first + len(positions)] = torch.from_numpy(values * np.float32(rope.magnitude))
    return cosine, sine
