"""The bandwidth at which threads read memory, which limits decoding. numpy."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from realizar.backends.machine import default_threads, free_memory_bytes

LEAST_BYTES = 1 << 20
"""Bytes of each thread, at least: less would be in the nearest caches, and calls would take longer than sums."""
_CHUNK_BYTES = 16 << 20  # of each thread: long against starting threads, short against a scheduler's time slice


def memory_bandwidth() -> float:
    """GB/s at which the threads of the CPU backend read memory, by an array of 1 GiB or a quarter of what is free."""
    return read_bandwidth(default_threads(), min(1 << 30, free_memory_bytes() // 4))


def read_bandwidth(threads: int, size_bytes: int = 1 << 30, passes: int = 5) -> float:
    """GB/s (10^9 bytes) at which threads read an array repeatedly, in order; the best of many chunks.

    An array larger than all caches gives the bandwidth of memory. A smaller one is cached as far as weights of that
    size would be. A chunk takes about a millisecond, so that some chunks are read undisturbed even on a busy machine.

    Args:
        threads: each sums its own part of an int64 array, with the interpreter's lock released.
        size_bytes: size of the array; at least `LEAST_BYTES` for each thread.
        passes: times that the array is read; a small one is read more often.
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
    """Cut a thread's part into chunks that are long enough to time, or repeat all of it several times."""
    if count < 2:
        return [(run, max(1, round(_CHUNK_BYTES / run.nbytes)))]
    return [(chunk, 1) for chunk in np.array_split(run, count)]


def _read(
    chunks: list[tuple[NDArray[np.int64], int]], passes: int, barrier: threading.Barrier
) -> list[tuple[float, float, int]]:
    """The start, the end and the bytes of each chunk's read. All threads begin each chunk together."""
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
