"""The limit that decoding runs into: how fast threads read memory. numpy."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

LEAST_BYTES = 1 << 20
"""Of each thread: less lies in the nearest caches all the same, and calls would take longer than sums."""
_CHUNK_BYTES = 16 << 20  # of each thread: long against starting threads, short against a scheduler's time slice


def read_bandwidth(threads: int, size_bytes: int = 1 << 30, passes: int = 5) -> float:
    """GB/s (10^9 bytes) at which threads read an array over and over, in order; the best of many pieces.

    An array that no cache holds gives the rate of memory. Of a smaller one caches hold what they hold of weights of
    that size. A piece takes about a millisecond, so that some pieces are read undisturbed on a busy machine too.

    Args:
        threads: readers; each sums its own run of an int64 array, with the interpreter's lock released.
        size_bytes: of the array; `LEAST_BYTES` for each thread are the least.
        passes: times that the array is read, at least; a small one is read more often.
    """
    array = np.ones(max(size_bytes, threads * LEAST_BYTES) // 8, dtype=np.int64)
    chunks = array.nbytes // threads // _CHUNK_BYTES
    runs = [_chunks(run, chunks) for run in np.array_split(array, threads)]
    barrier = threading.Barrier(threads)
    with ThreadPoolExecutor(threads) as pool:
        spans = list(pool.map(lambda run: _read(run, passes, barrier), runs))
    best = 0.0
    for at in range(len(spans[0])):
        started, ended = min(span[at][0] for span in spans), max(span[at][1] for span in spans)
        best = max(best, sum(span[at][2] for span in spans) / (ended - started))
    return best / 1e9


def _chunks(run: NDArray[np.int64], count: int) -> list[tuple[NDArray[np.int64], int]]:
    """A thread's run in pieces that are long enough to time: parts of it, or all of it several times over."""
    if count < 2:
        return [(run, max(1, round(_CHUNK_BYTES / run.nbytes)))]
    return [(chunk, 1) for chunk in np.array_split(run, count)]


def _read(
    chunks: list[tuple[NDArray[np.int64], int]], passes: int, barrier: threading.Barrier
) -> list[tuple[float, float, int]]:
    """When the reading of each piece began and ended, and its bytes. All threads begin each piece together."""
    spans = []
    for _ in range(passes):
        for chunk, times in chunks:
            barrier.wait()
            start_s = time.perf_counter()
            for _ in range(times):
                total = int(chunk.sum())
                if total != chunk.size:
                    barrier.abort()  # the others do not wait for this one
                    raise ArithmeticError(f"summed {total} ones, wrote {chunk.size}")
            spans.append((start_s, time.perf_counter(), chunk.nbytes * times))
    return spans
