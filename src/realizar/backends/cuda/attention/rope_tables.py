"""Cosines and sines of every position, one table per kind of rope in the model, and how queries grow with it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.models.parts import QueryGrowth, Rope
from realizar.models.spec import ModelSpec

_ROWS = 4096  # positions computed at once


class RopeTables:
    """float32 [context length, half] cosines and sines, and [context length] factors of queries.

    Tables of ropes of several axes have `spread` rows more, which each step fills for tokens whose positions differ
    from axis to axis. Angles are in float32 as the models were trained with.
    """

    def __init__(self, spec: ModelSpec, context_length: int, device: torch.device, spread: int = 0) -> None:
        ropes = {attention.rope for _, attention in spec.all_attentions() if attention.rope is not None}
        self._length, self._is_gpu = context_length, device.type == "cuda"
        self._tables = {rope: _tables(rope, context_length, device, spread if rope.axes else 0) for rope in ropes}
        growths = {attention.query_growth for _, attention in spec.attentions() if attention.query_growth is not None}
        self._scales = {growth: _scales(growth, context_length, device) for growth in growths}
        self._none = torch.zeros(1, device=device)

    def get(self, rope: Rope | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Without rope a tensor that nothing reads."""
        return (self._none, self._none) if rope is None else self._tables[rope]

    def place(self, positions: NDArray[np.int32]) -> None:
        """Start to fill the first rows after those of the context; int32 [axes, tokens]."""
        if not positions.shape[1]:
            return
        rows = slice(self._length, self._length + positions.shape[1])
        for rope, tables in self._tables.items():
            if rope.axes:
                for table, values in zip(tables, _values(rope, positions[list(rope.axes)].T), strict=True):
                    copied = torch.empty(values.shape, pin_memory=self._is_gpu)
                    copied.numpy()[:] = values
                    table[rows].copy_(copied, non_blocking=True)

    def query_scales(self, growth: QueryGrowth | None) -> torch.Tensor:
        """Where queries do not grow a tensor that nothing reads."""
        return self._none if growth is None else self._scales[growth]


def _scales(growth: QueryGrowth, length: int, device: torch.device) -> torch.Tensor:
    """To the bit those of the CPU backend."""
    factors = 1 + growth.factor * np.log(1 + np.arange(length, dtype=np.int32) // growth.period)
    return torch.from_numpy(factors.astype(np.float32)).to(device)


def _tables(rope: Rope, length: int, device: torch.device, spread: int) -> tuple[torch.Tensor, torch.Tensor]:
    cosine, sine = (torch.empty((length + spread, rope.size // 2), device=device) for _ in range(2))
    for first in range(0, length, _ROWS):
        positions = np.arange(first, min(first + _ROWS, length), dtype=np.int32)
        for table, values in zip((cosine, sine), _values(rope, positions[:, None]), strict=True):
            table[first : first + len(positions)] = torch.from_numpy(values)
    return cosine, sine


def _values(rope: Rope, positions: NDArray[np.int32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Cosines and sines of int32 [tokens, 1 or half], to the bit those of the CPU backend."""
    angles = positions.astype(np.float32) * np.array(rope.inverse_frequencies, np.float32)
    magnitude = np.float32(rope.magnitude)
    return np.cos(angles) * magnitude, np.sin(angles) * magnitude
