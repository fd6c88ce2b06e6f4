"""Codebooks of vectors as the kernels index them. numpy."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from realizar.quantization import Codebook


@cache
def codebook_table(book: Codebook, signs: bool) -> NDArray[np.uint8]:
    """uint8 [entries * vector_size]: the magnitudes of a codebook with signs.

    Without signs the codebook holds every entry of a grid shifted up, and then every one shifted down by two: the table
    has only the latter, plus 128, and kernels add the two.
    """
    entries: NDArray[np.signedinteger] = book.load()
    if not signs:
        entries = entries[book.entries // 2 :].astype(np.int16) + np.int16(128)
    return np.ascontiguousarray(entries.astype(np.uint8)).reshape(-1)
