"""Pooled hidden states as vectors of unit length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from realizar.errors import RealizarError


def unit_vectors(pooled: Sequence[tuple[float, ...] | None], hidden_size: int) -> NDArray[np.float32]:
    """Pooled states as rows, float32 [len(pooled), hidden_size], divided by their length; zeros stay zeros.

    Raises:
        RealizarError: an engine gave none for one of them.
    """
    vectors = np.zeros((len(pooled), hidden_size), np.float32)
    for row, values in zip(vectors, pooled, strict=True):
        if values is None:
            raise RealizarError("the engine gave no vector")
        state = np.asarray(values, np.float64)
        length = float(np.linalg.norm(state))
        row[:] = state / length if length > 0 else state
    return vectors
