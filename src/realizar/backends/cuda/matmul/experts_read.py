"""Counts on the device of the experts that steps read."""

from __future__ import annotations

import torch


class ExpertsRead:
    """Counts that kernels add to; nothing waits for them until they are asked for.

    Attributes:
        counts: int64 [2]: experts that mixtures have read, each once in a step, and steps of mixtures.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)

    def forget(self) -> None:
        """Begin again, after the steps that are on their way."""
        self.counts.zero_()

    def average(self) -> float | None:
        """Experts that a mixture read in a step; None if no kernel counted. Waits for the device."""
        read, steps = self.counts.tolist()
        return read / steps if steps else None
