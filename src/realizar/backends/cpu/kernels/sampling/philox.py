"""Philox4x32-10, as `backends/philox.py` has it: the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from realizar.backends.cpu.memory import inner

_WORD = np.uint64(0xFFFFFFFF)
_FIRST, _SECOND = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_FIRST_STEP, _SECOND_STEP = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_HALF = np.uint64(32)


@inner
def uniform_of(row: Any, position: int, draw: int) -> float:
    """The row's number in [0, 1) of a position's draw, one of the first four."""
    seed = np.uint64(row.seed)
    c0, c1 = np.uint64(position) & _WORD, np.uint64(row.choice) & _WORD
    c2 = c3 = np.uint64(0)
    k0, k1 = seed & _WORD, seed >> _HALF
    for _ in range(10):
        wide0, wide1 = _FIRST * c0, _SECOND * c2
        c0, c1, c2, c3 = (wide1 >> _HALF) ^ c1 ^ k0, wide1 & _WORD, (wide0 >> _HALF) ^ c3 ^ k1, wide0 & _WORD
        k0, k1 = (k0 + _FIRST_STEP) & _WORD, (k1 + _SECOND_STEP) & _WORD
    word = c0 if draw == 0 else (c1 if draw == 1 else (c2 if draw == 2 else c3))
    return np.float64(np.int64(word >> np.uint64(8))) * 2.0**-24
