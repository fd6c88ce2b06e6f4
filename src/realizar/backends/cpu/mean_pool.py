"""The mean of a row's hidden states, over any number of steps. numpy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class MeanPool:
    """Sum of vectors in float64, one after another, so that the mean does not depend on how they are cut into steps."""

    def __init__(self, hidden_size: int) -> None:
        self._sum = np.zeros(hidden_size, np.float64)
        self._count = 0

    def restart_at(self, count: int) -> None:
        """Say how many vectors came before the next: 0 starts again, as after preemption.

        Raises:
            RuntimeError: others than those added came before, so their sum is not known.
        """
        if count == 0:
            self._sum[:] = 0.0
            self._count = 0
        if count != self._count:
            raise RuntimeError(f"a mean over {count} earlier tokens is wanted, and {self._count} were seen")

    def add(self, hidden: NDArray[np.float32]) -> None:
        """Take in vectors, float32 [tokens, hidden_size]."""
        for vector in hidden:
            self._sum += vector
        self._count += len(hidden)

    def mean(self) -> NDArray[np.float32]:
        """The mean so far, float32 [hidden_size]."""
        return (self._sum / self._count).astype(np.float32)
