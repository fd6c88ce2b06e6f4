"""`SamplerGraphs`: the sampler of decodes as device graphs, by padded number of rows and set of kernels. torch."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial

import torch

from realizar.backends.cuda.capture import GraphRecorder, failure_of
from realizar.backends.cuda.sampling.native_rows import ADJUST, CUT, DRAW, DRY

_LOG = logging.getLogger(__name__)

VARIANTS = (DRAW, DRAW | CUT, ADJUST | DRAW, ADJUST | DRAW | CUT, ADJUST | DRAW | CUT | DRY)
"""Flags whose kernels a graph has, the cheapest first: a kernel that no row needs costs a few microseconds."""
_LAUNCHED = ADJUST | CUT | DRAW | DRY  # flags on which it depends which kernels a step needs


class SamplerGraphs:
    """Captured at load, replayed with one call. Steps of other rows than decodes launch kernel by kernel.

    Args:
        counts: padded numbers of rows, ascending.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = list(counts)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}

    def capture(self, launch: Callable[[int, int], None], device: torch.device) -> None:
        """Run and capture every graph, while the step's arrays name no row; a warning says where that fails.

        Args:
            launch: starts the sampler of so many choices with the kernels that flags need.

        Raises:
            DeviceLostError: the device failed, not the capture.
        """
        recorder = GraphRecorder(device)
        for flags in VARIANTS:
            launch(self._counts[-1], flags)  # loads its kernels
        for count in self._counts:
            for flags in VARIANTS:
                try:
                    self._graphs[count, flags] = recorder.record(partial(launch, count, flags))
                except Exception as error:  # noqa: BLE001 - raised again where the device failed
                    _LOG.warning("sampling runs without graphs: %s", failure_of(error))
                    self._graphs.clear()
                    return

    def find(self, count: int, flags: int) -> torch.cuda.CUDAGraph | None:
        """The graph that samples so many rows whose choices have these flags together; None where there is none."""
        at = bisect_left(self._counts, count)
        if not self._graphs or at == len(self._counts):
            return None
        wanted = flags & _LAUNCHED
        variant = next(variant for variant in VARIANTS if not wanted & ~variant)
        return self._graphs[self._counts[at], variant]

    def free(self) -> None:
        """Free the graphs, whose memory is not that of tensors."""
        self._graphs.clear()
