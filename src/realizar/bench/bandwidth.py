"""The limit that decoding runs into: how fast threads read memory. numpy."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np


def read_bandwidth(threads: int, size_bytes: int = 1 << 30, passes: int = 5) -> float:
    """GB/s (10^9 bytes) at which threads sum an int64 array that no cache holds; the best of several passes.

    Args:
        threads: readers; each sums one run of the array, with the interpreter's lock released.
        size_bytes: of the array.
    """
    array = np.ones(size_bytes // 8, dtype=np.int64)
    runs = np.array_split(array, threads)
    best_s = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(passes):
            start_s = time.perf_counter()
            total = sum(int(part) for part in pool.map(np.sum, runs))
            best_s = min(best_s, time.perf_counter() - start_s)
            if total != array.size:
                raise ArithmeticError(f"summed {total} ones, wrote {array.size}")
    return array.nbytes / best_s / 1e9
