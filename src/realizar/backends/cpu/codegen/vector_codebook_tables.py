"""Grids of the IQ types as the kernels index them. numpy."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from realizar.quantization.iq_grids import GridName, grid

_GRIDS: dict[str, GridName] = {
    "IQ1_S": "iq1",
    "IQ1_M": "iq1",
    "IQ2_XXS": "iq2_xxs",
    "IQ2_XS": "iq2_xs",
    "IQ2_S": "iq2_s",
    "IQ3_XXS": "iq3_xxs",
    "IQ3_S": "iq3_s",
}


@cache
def codebook_table(name: str) -> NDArray[np.uint8]:
    """uint8 [entries * entry_bytes]: magnitudes; for IQ1 the lower of an entry's two values, 8 g - 1, plus 128."""
    entries: NDArray[np.signedinteger] = grid(_GRIDS[name])
    if _GRIDS[name] == "iq1":
        entries = entries.astype(np.int16) * 8 + 127
    return np.ascontiguousarray(entries.astype(np.uint8)).reshape(-1)


def entry_bytes(name: str) -> int:
    """Columns of an entry."""
    return int(grid(_GRIDS[name]).shape[1])
