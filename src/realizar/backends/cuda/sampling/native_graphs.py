"""`SamplerGraphs`: the sampler's kernels as device graphs, by padded number of rows and set of kernels. torch."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import torch

from realizar.backends.cuda.capture import GraphRecorder, failure_of
from realizar.backends.cuda.sampling.native_rows import ADJUST, CUT, DRAW, DRY
from realizar.backends.cuda.shapes import row_counts

_LOG = logging.getLogger(__name__)

VARIANTS = (DRAW, DRAW | CUT, ADJUST | DRAW, ADJUST | DRAW | CUT, ADJUST | DRAW | CUT | DRY)
"""Flags whose kernels a graph has, the cheapest first: a kernel that no row needs costs a few microseconds."""
_LAUNCHED = ADJUST | CUT | DRAW | DRY  # flags on which it depends which kernels a step needs


def num_graphs(max_rows: int) -> int:
    """The number of graphs of a sampler: of sampling by padded rows and set of kernels, and of log-probabilities."""
    return len(row_counts(max_rows)) * (len(VARIANTS) + 1)


class SamplerGraphs:
    """Captured at load, replayed with one call. What has no graph is launched kernel by kernel.

    `counts` are padded numbers of rows, ascending; `variants` sets of kernels, the cheapest first, by default of
    sampling.
    """

    def __init__(self, counts: Sequence[int], variants: Sequence[int] = VARIANTS) -> None:
        self._counts, self._variants = list(counts), variants
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}

    def capture(self, launch: Callable[[int, int], None], device: torch.device) -> None:
        """Run and capture every graph, while the step's arrays name no row; a warning says where that fails.

        `launch` starts the sampler of so many tokens with the kernels that flags need. Raises DeviceLostError where
        the device failed, not the capture.
        """
        recorder = GraphRecorder(device)
        for flags in self._variants:
            launch(self._counts[-1], flags)  # loads its kernels
        for count in self._counts:
            for flags in self._variants:
                try:
                    self._graphs[count, flags] = recorder.record(partial(launch, count, flags))
                except Exception as error:  # noqa: BLE001 - raised again where the device failed
                    _LOG.warning("sampling runs without graphs: %s", failure_of(error))
                    self._graphs.clear()
                    return

    def padded(self, count: int) -> int:
        """The rows of the graph for so many; 0 where there is none."""
        at = bisect_left(self._counts, count)
        return self._counts[at] if self._graphs and at < len(self._counts) else 0

    def find(self, count: int, flags: int = 0) -> torch.cuda.CUDAGraph | None:
        """The graph of so many rows whose sampled tokens have these flags together; None where there is none."""
        padded = self.padded(count)
        if not padded:
            return None
        wanted = flags & _LAUNCHED
        variant = next(variant for variant in self._variants if not wanted & ~variant)
        return self._graphs[padded, variant]

    def free(self) -> None:
        self._graphs.clear()
