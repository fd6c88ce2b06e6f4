"""What towers share on all devices: squares of patches, and shares of positions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def squares_of(patches: Any, merge: int, *, by_channel: bool) -> Any:
    rows, columns, width = patches.shape
    grid = patches.reshape(rows // merge, merge, columns // merge, merge, width)
    order = (0, 2, 4, 1, 3) if by_channel else (0, 2, 1, 3, 4)
    ordered = grid.transpose(*order) if isinstance(grid, np.ndarray) else grid.permute(*order)
    return ordered.reshape(-1, merge**2 * width)


def between(count: int, side: int) -> NDArray[np.float32]:
    """Shares of `side` places in each of `count` that are spread evenly from the first to the last."""
    at = np.linspace(0, side - 1, count, dtype=np.float32)
    low = at.astype(np.int32)
    shares = np.zeros((count, side), np.float32)
    shares[np.arange(count), low] = 1 - (at - low)
    shares[np.arange(count), np.minimum(low + 1, side - 1)] += at - low
    return shares
