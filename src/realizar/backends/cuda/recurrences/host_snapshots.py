"""`HostSnapshots`: snapshots of states in pinned memory of the host, with copies beside the steps. torch."""

from __future__ import annotations

import logging
import mmap
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch

from realizar.backends.cuda.sleep.driver import CUDADriver
from realizar.backends.cuda.sleep.host_memory import map_pages
from realizar.backends.machine import free_memory_bytes
from realizar.batch import StateMoves
from realizar.errors import CapacityError, KernelError
from realizar.sizes import format_bytes

_LOG = logging.getLogger(__name__)
_FETCHES = 5  # to know how long one takes
_PIECE_BYTES = 32 << 20  # pinned at once, while a step waits; or one snapshot where that is more
_PAGE_BYTES = 4096


class HostSnapshots:
    """Copies of slots of the device's states. On a GPU they go over a stream of their own.

    A step waits for the snapshots that its rows start from, and for no others before it ends: what leaves the device
    does so while the step computes. Addresses are reserved; a piece of the memory is taken and pinned when a snapshot
    is first in it, and the first piece at once. The memory is given back by `close`, or with this object after a load
    that failed.

    Args:
        tensors: of all layers, on one device; the first dimension of each is the slot.
        rows: slots of rows; snapshot s has slot `rows + s`.
        count: snapshots on the host, at least one.

    Raises:
        CapacityError: the host has no memory for them. KernelError: the driver pins none.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], rows: int, count: int) -> None:
        self._tensors, self._rows, device = tensors, rows, tensors[0].device
        self._sizes = [tensor[0].numel() for tensor in tensors]
        self._floats = sum(self._sizes)  # of a snapshot
        snapshot_bytes = 4 * self._floats
        self._size_bytes = snapshot_bytes * count
        self._per_piece = min(max(_PIECE_BYTES // snapshot_bytes, 1), count)
        # A copy must lie within what was pinned at once, and no page may be pinned twice.
        self._piece_bytes = -(-self._per_piece * snapshot_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self._map = _reserve(self._size_bytes, -(-count // self._per_piece) * self._piece_bytes)
        self._memory = torch.frombuffer(self._map, dtype=torch.float32)
        self._pinned: dict[int, int] = {}  # addresses by piece
        self._driver: CUDADriver | None = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            driver = CUDADriver(device)
            self._unpins = weakref.finalize(self, _unpin_unless_lost, driver, self._pinned, self._map)
            self._unpins.atexit = False  # the driver may have ended by then
            self._driver = driver
            self._pin(0)
            self._stream = torch.cuda.Stream(device)
        self._busy, self._pins_more = False, True

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
            _unpin(driver, self._pinned)

    def _start(self, moves: StateMoves) -> torch.cuda.Event | None:
        """Start all copies; an event after those that rows start from."""
        for row, host_snapshot in moves.fetched:
            self._to_device(host_snapshot, row)
        fetched = None
        if moves.fetched and self._stream is not None:
            fetched = self._stream.record_event()
        for snapshot, host_snapshot in moves.stored:
            self._take(host_snapshot // self._per_piece)
            for tensor, part in zip(self._tensors, self._parts(host_snapshot), strict=True):
                part.copy_(tensor[self._rows + snapshot], non_blocking=True)
        came_from = dict(moves.fetched)
        for row, snapshot in moves.kept:
            self._to_device(came_from[row], self._rows + snapshot)
        return fetched

    def _to_device(self, host_snapshot: int, slot: int) -> None:
        for tensor, part in zip(self._tensors, self._parts(host_snapshot), strict=True):
            tensor[slot].copy_(part, non_blocking=True)

    def _parts(self, host_snapshot: int) -> list[torch.Tensor]:
        piece, place = divmod(host_snapshot, self._per_piece)
        start = piece * self._piece_bytes // 4 + place * self._floats
        split = self._memory[start : start + self._floats].split(self._sizes)
        return [part.view(tensor.shape[1:]) for part, tensor in zip(split, self._tensors, strict=True)]

    def _take(self, piece: int) -> None:
        """Pin a piece that is to be written; where the driver does not, the host waits for the copies all the same."""
        if self._driver is None or piece in self._pinned or not self._pins_more:
            return
        try:
            self._pin(piece)
        except KernelError as error:
            self._pins_more = False
            pinned = format_bytes(len(self._pinned) * self._piece_bytes)
            _LOG.warning("snapshots of states beyond %s are moved slowly: %s", pinned, error)

    def _pin(self, piece: int) -> None:
        assert self._driver is not None
        address = self._memory.data_ptr() + piece * self._piece_bytes
        self._driver.pin(address, self._piece_bytes)
        self._pinned[piece] = address

    def _synchronize(self) -> None:
        if self._stream is not None:
            torch.cuda.synchronize(self._stream.device)


def _unpin(driver: CUDADriver, pinned: dict[int, int]) -> None:
    driver.synchronize()
    while pinned:
        driver.unpin(pinned.popitem()[1])


def _unpin_unless_lost(driver: CUDADriver, pinned: dict[int, int], _mapped: mmap.mmap) -> None:
    """Give back what nobody has closed, which is mapped until then."""
    with suppress(KernelError, RuntimeError):  # of a GPU that is lost
        _unpin(driver, pinned)


def _reserve(size_bytes: int, mapped_bytes: int) -> mmap.mmap:
    """Addresses whose memory the system gives when it is pinned or written; too much of it would end the process."""
    free = free_memory_bytes()
    refused = CapacityError(
        f"the host has no {format_bytes(size_bytes)} for snapshots of states, with {format_bytes(free)} free:"
        " lower host_snapshot_bytes"
    )
    if size_bytes > free:
        raise refused
    try:
        return map_pages(mapped_bytes)
    except (OSError, ValueError, OverflowError) as error:
        raise refused from error
