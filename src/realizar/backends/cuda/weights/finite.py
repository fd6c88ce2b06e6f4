"""The search for weights that are NaN or infinite, before they are packed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from realizar.quantization import MatrixSource

_CHECKED_BYTES = 4 << 20  # of a matrix, by one thread at a time


def check_finite(sources: Iterable[MatrixSource]) -> None:
    """Refuse matrices with weights that are not finite. Several threads also bring their pages in.

    Raises:
        CheckpointError: a weight is NaN or infinite.
    """
    runs = [
        (source, start, min(start + step, source.out_features))
        for source in sources
        for step in (max(1, _CHECKED_BYTES // source.row_bytes),)
        for start in range(0, source.out_features, step)
    ]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for _ in pool.map(lambda run: run[0].check_finite(run[1], run[2]), runs):
            pass
