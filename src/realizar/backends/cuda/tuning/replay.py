"""Times on the device, by events."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def replay_ms(run: Callable[[], None], repeats: int = 7) -> float:
    """Median time of a CUDA graph of what `run` launches."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    return median_ms(graph.replay, repeats)


def median_ms(run: Callable[[], object], repeats: int) -> float:
    """Median time on the device of what `run` launches."""
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)
