"""One allocation on the device for many tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch

ALIGNMENT = 256  # bytes: of every part


class Store:
    """One allocation of the sum of these parts, handed out from its start on, in any order, and never taken back.

    Raises torch.OutOfMemoryError where the device has not as much in one piece.
    """

    def __init__(self, part_sizes: Iterable[int], device: torch.device) -> None:
        self._memory = torch.empty(sum(map(aligned, part_sizes)), dtype=torch.uint8, device=device)
        self._used = 0

    def take(self, size_bytes: int) -> torch.Tensor:
        """uint8 [size_bytes], uninitialised; memory of its own where it is more than is left."""
        first, end = self._used, self._used + size_bytes
        if end > self._memory.numel():
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._memory.device)
        self._used = first + aligned(size_bytes)
        return self._memory[first:end]


def aligned(size_bytes: int) -> int:
    """A size in bytes rounded up to where the next part may start."""
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
