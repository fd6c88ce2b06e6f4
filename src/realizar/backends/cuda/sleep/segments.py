"""`Segments`: a model's memory on the GPU at addresses that stay while the memory comes and goes. No torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from realizar.backends.cuda.sleep.driver import SleepDriver
from realizar.backends.cuda.sleep.host_memory import CHUNK_BYTES, HostMemory
from realizar.errors import DeviceLostError, KernelError

_COPIES_AHEAD = 4
"""Copies that are on their way before memory is freed behind the first of them: the bus is never idle."""


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

        Memory is freed behind its copy: the driver clears what is freed, which slows another model's copies down.

        Raises:
            CapacityError: the host has too little memory; the contents are still on the GPU.
            KernelError: the driver pins no more of it; the same holds.
            DeviceLostError: the same, but they are not.
        """
        if self._asleep is not None:
            raise RuntimeError("the model is asleep already")
        there = [each for each in self._segments.values() if each.handle is not None]
        there.sort(key=lambda each: not each.keeps)
        size = sum(each.size_bytes for each in there if each.keeps)
        self._driver.synchronize()
        self._prepare_host(size)
        try:
            self._save(there)
        except KernelError as error:
            self._bring_back(there, error)
            self._forget_host()
            raise
        self._asleep = there
        return size

    def wake(self) -> int:
        """Put memory to the same addresses again, with what was kept; returns the bytes copied.

        Raises:
            KernelError: the GPU has too little memory; the model is asleep as before.
        """
        if self._asleep is None:
            raise RuntimeError("the model is not asleep")
        self._restore(self._asleep)
        copied = sum(each.size_bytes for each in self._asleep if each.keeps)
        self._asleep = None
        return copied

    def close(self) -> None:
        """Give the host's memory back; segments are freed by `free`."""
        self._forget_host()

    def _prepare_host(self, size: int) -> None:
        if self._host is not None and self._host.size_bytes != size:
            self._forget_host()
        if self._host is None and size:
            self._host = HostMemory(self._driver, size, self._chunk_bytes)

    def _save(self, segments: Iterable[Segment]) -> None:
        """Copy what is kept, and free everything: what is not kept first, the rest behind its copies."""
        offset, on_the_way = 0, deque[tuple[Segment, object]]()
        for each in segments:
            if not each.keeps:
                self._unmap(each)
        for each in segments:
            if not each.keeps:
                continue
            for part in self._host_memory().parts(offset, each.size_bytes):
                self._driver.copy_to_host(part.address, each.address + part.start, part.size_bytes)
            offset += each.size_bytes
            on_the_way.append((each, self._driver.mark()))
            if len(on_the_way) > _COPIES_AHEAD:
                self._unmap_copied(*on_the_way.popleft())
        while on_the_way:
            self._unmap_copied(*on_the_way.popleft())

    def _unmap_copied(self, segment: Segment, mark: object) -> None:
        self._driver.wait(mark)
        self._unmap(segment)

    def _restore(self, segments: Iterable[Segment]) -> None:
        """Map those segments that have no memory, with what was kept. Where that fails they have none as before."""
        offset, mapped = 0, list[Segment]()
        try:
            for each in segments:  # the next segment is mapped while the one before is copied
                start, offset = offset, offset + (each.size_bytes if each.keeps else 0)
                if each.handle is not None:
                    continue
                each.handle = self._driver.map(each.address, each.size_bytes)
                mapped.append(each)
                if not each.keeps:
                    self._driver.zero(each.address, each.size_bytes)
                    continue
                for part in self._host_memory().parts(start, each.size_bytes):
                    self._driver.copy_to_device(each.address + part.start, part.address, part.size_bytes)
            self._driver.synchronize()
        except BaseException:
            with suppress(KernelError):
                self._driver.synchronize()
            for each in mapped:
                self._unmap(each)
            raise

    def _bring_back(self, segments: Iterable[Segment], error: KernelError) -> None:
        """Undo a half of `_save`.

        Raises:
            DeviceLostError: the GPU has no memory for it any more.
        """
        try:
            self._driver.synchronize()
            self._restore(segments)
        except KernelError as second:
            raise DeviceLostError(f"weights are lost: {error}, and then {second}") from second

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
