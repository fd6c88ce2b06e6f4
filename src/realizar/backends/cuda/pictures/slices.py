"""`Slicer` launches parts of an encoder's work on a picture that take together what a slice between two steps may."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from realizar.models.parts import Linear

# A second of an H200, which a measured pace multiplies: FLOP of matmuls and of attention, and bytes between them.
_MATMULS, _ATTENTION, _MOVED = 6.5e14, 3.5e14, 2.5e12
_LEAST_S = 2e-5  # of a part
_LEAST_PACE, _MOST_PACE = 0.25, 256.0  # of processors and cards far slower
_NEWEST = 0.2  # share of the last slice in the pace
_POLL_S = 2e-4


def matmuls_s(rows: int, *linears: Linear) -> float:
    """Seconds of matmuls with so many rows, and of the kernels before and behind that move inputs and outputs."""
    flops = sum(2.0 * rows * each.out_features * each.in_features for each in linears)
    moved = 4.0 * rows * (linears[0].in_features + sum(each.out_features for each in linears))
    return max(flops / _MATMULS + moved / _MOVED, _LEAST_S)


def attention_s(flops: float) -> float:
    return max(flops / _ATTENTION, _LEAST_S)


class PartsLeft:
    """Parts that are still to be launched.

    Attributes:
        next_s: seconds of an H200 that the next one takes; None where nothing is left.
    """

    def __init__(self, parts: Iterator[float]) -> None:
        """`parts` gives the seconds of each part, which it launches when it is asked for those of the next."""
        self._parts = parts
        self.next_s = next(parts, None)

    def launch(self) -> None:
        """Launch the next part."""
        self.next_s = next(self._parts, None)


class Slicer:
    """Launches on the current stream, and measures there how fast the device is."""

    def __init__(self, *, is_gpu: bool) -> None:
        self._is_gpu = is_gpu
        self._saved_s, self._pace = 0.0, 1.0  # of slices too short for a part; a slice's seconds over those expected
        self._timed: tuple[torch.cuda.Event, torch.cuda.Event, float] | None = None

    def launch(self, left: PartsLeft, seconds: float) -> bool:
        """Launch parts that take no longer, one after another; True if some are left.

        One that takes longer alone is launched once the slices since the last one together had so long.
        """
        self._measure()
        left_s, expected_s = self._saved_s + seconds, 0.0
        begun = recorded(timed=True) if self._is_gpu else None
        while left.next_s is not None and left.next_s * self._pace <= left_s:
            expected_s += left.next_s
            left_s -= left.next_s * self._pace
            left.launch()
        self._saved_s = 0.0 if expected_s else left_s
        if expected_s and begun is not None and self._timed is None:
            self._timed = begun, recorded(timed=True), expected_s
        return left.next_s is not None

    def _measure(self) -> None:
        """Take in the time of the last slice that was measured, where it has ended."""
        if self._timed is not None and self._timed[1].query():
            begun, ended, expected_s = self._timed
            pace = begun.elapsed_time(ended) * 1e-3 / expected_s
            self._pace += _NEWEST * (min(max(pace, _LEAST_PACE), _MOST_PACE) - self._pace)
            self._timed = None


def recorded(*, timed: bool = False) -> torch.cuda.Event:
    """An event on the current stream."""
    event = torch.cuda.Event(enable_timing=timed)
    event.record()
    return event


def wait_for(event: torch.cuda.Event) -> None:
    """Wait beside the loop of steps, which gets the interpreter meanwhile, as it does not from torch's own waiting."""
    while not event.query():
        time.sleep(_POLL_S)
