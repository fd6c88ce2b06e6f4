"""`Segments`: a model's memory on the GPU at addresses that stay while the memory comes and goes. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from realizar.backends.cuda.sleep.driver import SleepDriver
from realizar.backends.cuda.sleep.host_memory import CHUNK_BYTES, HostMemory
from realizar.errors import CapacityError, KernelError


@dataclass(slots=True, eq=False)
class Segment:
    """A range of addresses.

    Attributes:
        address: the first. size_bytes: of all.
        keeps: the contents are saved; otherwise they are zeros after waking.
        handle: of the memory there; None while there is none.
    """

    address: int
    size_bytes: int
    keeps: bool
    handle: object | None


class Segments:
    """All segments of a model.

    Args:
        chunk_bytes: of the host's memory that are pinned at once.
    """

    def __init__(self, driver: SleepDriver, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._driver, self._chunk_bytes = driver, chunk_bytes
        self._segments: dict[int, Segment] = {}
        self._asleep: list[Segment] | None = None  # with memory before, in the order of their saved contents
        self._host: HostMemory | None = None

    @property
    def device_bytes(self) -> int:
        """Memory on the GPU now."""
        return sum(each.size_bytes for each in self._segments.values() if each.handle is not None)

    @property
    def host_bytes(self) -> int:
        """Memory of the host that is kept for the contents."""
        return 0 if self._host is None else self._host.size_bytes

    def allocate(self, size_bytes: int, *, keeps: bool) -> int:
        """Memory at new addresses; returns the first.

        Raises:
            KernelError: the driver has none.
        """
        page = self._driver.granularity_bytes
        size = max(-(-size_bytes // page), 1) * page
        address = self._driver.reserve(size)
        try:
            handle = self._driver.map(address, size)
        except BaseException:
            self._driver.release(address, size)
            raise
        self._segments[address] = Segment(address, size, keeps, handle)
        return address

    def free(self, address: int) -> None:
        """Give a segment's memory and addresses back."""
        segment = self._segments.pop(address)
        self._unmap(segment)
        self._driver.release(segment.address, segment.size_bytes)

    def discard(self, addresses: Iterable[int]) -> None:
        """Free the memory of segments that nothing will use again; their addresses stay taken."""
        self._driver.synchronize()
        for address in addresses:
            if address in self._segments:
                self._unmap(self._segments[address])

    def sleep(self) -> int:
        """Copy what is kept to the host, and free all memory on the GPU; returns the bytes copied.

        Raises:
            CapacityError: the host has too little memory; the contents are still on the GPU.
            KernelError: the driver pins no more of it; the same holds.
        """
        if self._asleep is not None:
            raise RuntimeError("the model is asleep already")
        there = [each for each in self._segments.values() if each.handle is not None]
        there.sort(key=lambda each: not each.keeps)
        size = sum(each.size_bytes for each in there if each.keeps)
        self._driver.synchronize()
        try:
            self._save(there, size)
        except (CapacityError, KernelError):
            self._forget_host()
            raise
        for each in there:
            self._unmap(each)
        self._asleep = there
        return size

    def wake(self) -> int:
        """Put memory to the same addresses again, with what was kept; returns the bytes copied.

        Raises:
            KernelError: the GPU has too little memory; the model is asleep as before.
        """
        if self._asleep is None:
            raise RuntimeError("the model is not asleep")
        offset = 0
        try:
            for each in self._asleep:  # the next segment is mapped while the one before is copied
                each.handle = self._driver.map(each.address, each.size_bytes)
                if not each.keeps:
                    self._driver.zero(each.address, each.size_bytes)
                    continue
                for part in self._host_memory().parts(offset, each.size_bytes):
                    self._driver.copy_to_device(each.address + part.start, part.address, part.size_bytes)
                offset += each.size_bytes
            self._driver.synchronize()
        except BaseException:
            with suppress(KernelError):
                self._driver.synchronize()
            for each in self._asleep:
                self._unmap(each)
            raise
        self._asleep = None
        return offset

    def close(self) -> None:
        """Give the host's memory back; segments are freed by `free`."""
        self._forget_host()

    def _save(self, segments: Iterable[Segment], size: int) -> None:
        if self._host is not None and self._host.size_bytes != size:
            self._forget_host()
        if self._host is None and size:
            self._host = HostMemory(self._driver, size, self._chunk_bytes)
        offset = 0
        for each in segments:
            if each.keeps:
                for part in self._host_memory().parts(offset, each.size_bytes):
                    self._driver.copy_to_host(part.address, each.address + part.start, part.size_bytes)
                offset += each.size_bytes
        self._driver.synchronize()

    def _host_memory(self) -> HostMemory:
        if self._host is None:
            raise RuntimeError("no memory of the host holds the contents")
        return self._host

    def _forget_host(self) -> None:
        host, self._host = self._host, None
        if host is not None:
            with suppress(KernelError):
                self._driver.synchronize()
            host.close()

    def _unmap(self, segment: Segment) -> None:
        handle, segment.handle = segment.handle, None
        if handle is not None:
            self._driver.unmap(segment.address, segment.size_bytes, handle)
