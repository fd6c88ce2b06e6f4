"""`HostSnapshots`: snapshots of states in pinned memory of the host, with copies beside the steps. torch."""

from __future__ import annotations

import mmap
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch

from realizar.backends.cuda.sleep.driver import CUDADriver, SleepDriver
from realizar.backends.cuda.sleep.host_memory import map_pages
from realizar.backends.machine import free_memory_bytes
from realizar.errors import CapacityError, KernelError
from realizar.sizes import format_bytes
from realizar.state_moves import StateMoves

_FETCHES = 5  # to know how long one takes


class HostSnapshots:
    """Copies of slots of the device's states. On a GPU they go over a stream of their own.

    A step waits for the snapshots that its rows start from, and for no others before it ends: what leaves the device
    does so while the step computes. The memory is given back by `close`, or with this object after a load that failed.

    Args:
        tensors: of all layers, on one device; the first dimension of each is the slot.
        rows: slots of rows; snapshot s has slot `rows + s`.
        count: snapshots on the host, at least one.

    Raises:
        CapacityError: the host has no memory for them. KernelError: the driver pins no more.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], rows: int, count: int) -> None:
        self._tensors, self._rows, device = tensors, rows, tensors[0].device
        sizes = [tensor[0].numel() for tensor in tensors]
        self._size_bytes = 4 * sum(sizes) * count
        self._map = _reserve(self._size_bytes)
        memory = torch.frombuffer(self._map, dtype=torch.float32, count=sum(sizes) * count).view(count, sum(sizes))
        self._parts = [  # of each snapshot, by tensor
            [part.view(tensor.shape[1:]) for part, tensor in zip(each.split(sizes), tensors, strict=True)]
            for each in memory
        ]
        self._driver: SleepDriver | None = None
        self._address = memory.data_ptr()
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            driver = CUDADriver(device)
            driver.pin(self._address, self._size_bytes)
            self._driver, self._stream = driver, torch.cuda.Stream(device)
            self._unpins = weakref.finalize(self, _unpin_unless_lost, driver, self._address, self._map)
            self._unpins.atexit = False  # the driver may have ended by then
        self._busy = False

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def begin(self, moves: StateMoves) -> None:
        """Start a step's copies to the host and from there, before all others of the step."""
        if not (moves.stored or moves.fetched):
            return
        if self._stream is None:
            self._start(moves)
            return
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)  # what the steps before do to the slots
        with torch.cuda.stream(self._stream):
            fetched = self._start(moves)
        if fetched is not None:
            current.wait_event(fetched)
        self._busy = True

    def end(self) -> None:
        """Have what follows on the device wait for the copies: slots may be written again."""
        if self._busy and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._busy = False

    def time_fetch(self) -> float:
        """Seconds in which a snapshot becomes the state of row 0, which is lost; the middle of some."""
        seconds = []
        for _ in range(_FETCHES):
            self._synchronize()
            start_s = time.perf_counter()
            self.begin(StateMoves(fetched=((0, 0),)))
            self.end()
            self._synchronize()
            seconds.append(time.perf_counter() - start_s)
        return sorted(seconds)[_FETCHES // 2]

    def close(self) -> None:
        """Give the memory back to the system. Nothing may copy from or to it any more; idempotent."""
        driver, self._driver = self._driver, None
        if driver is not None:
            self._unpins.detach()
            _unpin(driver, self._address)

    def _start(self, moves: StateMoves) -> torch.cuda.Event | None:
        """Start all copies; an event after those that rows start from."""
        for row, host_snapshot in moves.fetched:
            self._to_device(host_snapshot, row)
        fetched = None
        if moves.fetched and self._stream is not None:
            fetched = self._stream.record_event()
        for snapshot, host_snapshot in moves.stored:
            for tensor, part in zip(self._tensors, self._parts[host_snapshot], strict=True):
                part.copy_(tensor[self._rows + snapshot], non_blocking=True)
        came_from = dict(moves.fetched)
        for row, snapshot in moves.kept:
            self._to_device(came_from[row], self._rows + snapshot)
        return fetched

    def _to_device(self, host_snapshot: int, slot: int) -> None:
        for tensor, part in zip(self._tensors, self._parts[host_snapshot], strict=True):
            tensor[slot].copy_(part, non_blocking=True)

    def _synchronize(self) -> None:
        if self._stream is not None:
            torch.cuda.synchronize(self._stream.device)


def _unpin(driver: SleepDriver, address: int) -> None:
    driver.synchronize()
    driver.unpin(address)


def _unpin_unless_lost(driver: SleepDriver, address: int, _mapped: mmap.mmap) -> None:
    """Give back what nobody has closed, which is mapped until then."""
    with suppress(KernelError, RuntimeError):  # of a GPU that is lost
        _unpin(driver, address)


def _reserve(size_bytes: int) -> mmap.mmap:
    """Memory that the system gives when it is pinned or written: of more than there is, it would end a process then."""
    free = free_memory_bytes()
    refused = CapacityError(
        f"the host has no {format_bytes(size_bytes)} for snapshots of states, with {format_bytes(free)} free:"
        " lower host_snapshot_bytes"
    )
    if size_bytes > free:
        raise refused
    try:
        return map_pages(size_bytes)
    except (OSError, ValueError, OverflowError) as error:
        raise refused from error
