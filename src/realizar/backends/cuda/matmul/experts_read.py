"""Counts on the device of the experts that steps read."""

from __future__ import annotations

import torch


class ExpertsRead:
    """Counts that kernels add to; nothing waits for them until they are asked for.

    Attributes:
        counts: int64 [2, 2], of mixtures without a shared expert among theirs, and of those with one: experts that they
            have read, each once in a step, and steps.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.counts = torch.zeros((2, 2), dtype=torch.int64, device=device)

    def address(self, shared: int) -> int:
        """Of the counts that a kernel adds to; `shared` as in `PackedExperts`."""
        return self.counts[shared].data_ptr()

    def forget(self) -> None:
        """Begin again, after the steps that are on their way."""
        self.counts.zero_()

    def average(self) -> float | None:
        """Chosen experts that a mixture read in a step; None if no kernel counted. Waits for the device."""
        (read, steps), (with_shared, shared_steps) = self.counts.tolist()
        chosen = read + with_shared - shared_steps  # each of those steps read the shared expert too
        return chosen / (steps + shared_steps) if steps + shared_steps else None
