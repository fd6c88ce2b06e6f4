"""Times of a step's launches on the device, and the device's memory bandwidth."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import torch

from realizar.backends.base import ForwardInput
from realizar.backends.cuda.device import DeviceProfile, free_bytes
from realizar.backends.cuda.device_errors import device_errors
from realizar.backends.cuda.runner import CUDABackend
from realizar.backends.inspection import ReadLimit
from realizar.backends.parts import PartTime
from realizar.errors import CapacityError, RealizarError
from realizar.sizes import format_bytes

_AT_ONCE = 100  # launches behind one hold; with their events they fit the queue of a stream
_CYCLES_PER_S = 2_000_000_000  # no GPU's clock is much faster
_LONGEST_HOLD_S = 2.0
_READ_BYTES = 4 << 30
_LEAST_READ_BYTES = 64 << 20

Clock = Callable[[Sequence[Callable[[], None]]], list[float]]
"""Seconds of each of these launches, one after the other."""


class EventClock:
    """Events around each launch.

    The host is slower than the device: without more ado an event would come when the device has long been idle. So the
    device is held until the host has launched all. A hold that was too short is found out and made longer.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._hold_s = 0.01

    def seconds(self, starts: Sequence[Callable[[], None]]) -> list[float]:
        """Raises RealizarError: the host can't launch as much as the device is held for."""
        found: list[float] = []
        for first in range(0, len(starts), _AT_ONCE):
            found += self._held(starts[first : first + _AT_ONCE])
        return found

    def _held(self, starts: Sequence[Callable[[], None]]) -> list[float]:
        while True:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(len(starts) + 2)]
            torch.cuda._sleep(int(self._hold_s * _CYCLES_PER_S))
            events[0].record()
            events[1].record()  # what two events are apart with nothing between
            for start, event in zip(starts, events[2:], strict=True):
                start()
                event.record()
            in_time = not events[0].query()
            torch.cuda.synchronize(self._device)
            if in_time:
                apart = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
                return [max(0.0, ms - apart[0]) / 1e3 for ms in apart[1:]]
            self._hold_s *= 2
            if self._hold_s > _LONGEST_HOLD_S:
                raise RealizarError("a step's launches can't be timed: the host is too busy to launch them in time")


def _clock(device: DeviceProfile) -> Clock:
    return EventClock(device.torch_device).seconds if device.is_gpu else _host_seconds


def _host_seconds(starts: Sequence[Callable[[], None]]) -> list[float]:
    """Under Triton's interpreter, which has run a launch when the launch returns."""
    found = []
    for start in starts:
        began = time.perf_counter()
        start()
        found.append(time.perf_counter() - began)
    return found


def time_launches(backend: CUDABackend, step: ForwardInput, repeats: int) -> list[PartTime]:
    """Run a step launch by launch, without its graph, `repeats` times over: the best of each. Its rows are open.

    Events between launches keep a kernel from starting while the one before ends, so that the sum may exceed a step.
    Raises RealizarError where the launches can't be timed here.
    """
    device = backend.device
    seconds = _clock(device)
    with device_errors(device.torch_device):
        backend.submit(step).result()
        launches = backend.launches(step)
        starts = [launch.start for launch in launches]
        for start in starts:  # compiles what only graphs have run so far
            start()
        runs = [seconds(starts) for _ in range(repeats)]
    best = [min(times) for times in zip(*runs, strict=True)]
    return [PartTime(each.name, best_s, each.bytes_read) for each, best_s in zip(launches, best, strict=True)]


def read_limit(backend: CUDABackend, repeats: int = 10) -> ReadLimit:
    """The rate at which the device sums float32 that no cache holds, the best of several.

    Raises CapacityError where beside the model no memory is free to read.
    """
    device = backend.device
    seconds = _clock(device)
    size = min(_READ_BYTES if device.is_gpu else _LEAST_READ_BYTES, free_bytes(device) // 2)
    if size < _LEAST_READ_BYTES:
        raise CapacityError(f"{format_bytes(size)} are free on the GPU, too little to measure how fast it reads")
    with device_errors(device.torch_device):
        values = torch.ones(size // 4, dtype=torch.float32, device=device.torch_device)

        def read() -> None:
            values.sum()

        read()
        least_s = min(seconds([read] * repeats))
    return ReadLimit(values.numel() * 4 / least_s / 1e9, values.numel() * 4)
