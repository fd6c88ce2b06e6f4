"""`LoadMemory`: where a load's tensors lie, so that their memory can be given back while the model sleeps. torch."""

from __future__ import annotations

import ctypes
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch

from realizar.backends.base import Transfer
from realizar.backends.cuda.sleep.driver import CUDADriver
from realizar.backends.cuda.sleep.host_memory import CHUNK_BYTES, HostMemory
from realizar.errors import DeviceLostError, KernelError, RealizarError, UnsupportedModelError

_LOG = logging.getLogger(__name__)
_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_functions: list[Any] = []  # torch calls them for as long as the process lives


class LoadMemory:
    """Memory of a model that stays on its device: tensors lie wherever torch puts them."""

    def kept(self) -> AbstractContextManager[None]:
        """A part of the load whose tensors keep their contents while the model sleeps. Parts don't nest."""
        return nullcontext()

    def emptied(self) -> AbstractContextManager[None]:
        """A part of the load whose tensors are zeros after waking."""
        return nullcontext()

    def sleep(self) -> Transfer:
        """See `backends.base.Sleeps`."""
        raise UnsupportedModelError("the model was not loaded so that its weights can wait in the host's memory")

    def wake(self) -> Transfer:
        """See `backends.base.Sleeps`."""
        raise UnsupportedModelError("the model was not loaded so that its weights can wait in the host's memory")

    def close(self) -> None:
        """Give all memory back, once no tensor lies in it."""


class SleepingMemory(LoadMemory):
    """Memory of a model that can sleep, on the current GPU: each part of its load has a torch pool of our segments.

    Raises UnsupportedModelError where torch was built for another maker's GPUs.
    """

    def __init__(self, device: torch.device) -> None:
        if torch.version.hip is not None:
            raise UnsupportedModelError("weights can wait in the host's memory with NVIDIA's GPUs alone")
        self._segments = Segments(CUDADriver(device))
        self._allocators = {keeps: self._allocator(keeps=keeps) for keeps in (True, False)}
        self._pools: list[Any] = []

    def kept(self) -> AbstractContextManager[None]:
        return self._part(keeps=True)

    def emptied(self) -> AbstractContextManager[None]:
        return self._part(keeps=False)

    def sleep(self) -> Transfer:
        return _timed(self._segments.sleep)

    def wake(self) -> Transfer:
        return _timed(self._segments.wake)

    def close(self) -> None:
        self._pools.clear()
        torch.cuda.empty_cache()  # which frees the segments
        self._segments.close()

    @contextmanager
    def _part(self, *, keeps: bool) -> Iterator[None]:
        """A pool of its own, which nothing is taken from afterwards: what is unused at its end is freed for good."""
        pool = torch.cuda.MemPool(self._allocators[keeps])
        self._pools.append(pool)
        with torch.cuda.use_mem_pool(pool):
            yield
        found = torch.cuda.memory_snapshot()
        self._segments.discard(each["address"] for each in found if not each["allocated_size"] + each["active_size"])

    def _allocator(self, *, keeps: bool) -> Any:
        def allocate(size_bytes: int, _device: int, _stream: int | None) -> int | None:
            try:
                return self._segments.allocate(size_bytes, keeps=keeps)
            except RealizarError as error:  # torch says that it is out of memory
                _LOG.info("%d bytes were not allocated: %s", size_bytes, error)
                return None

        def free(address: int, _size_bytes: int, _device: int, _stream: int | None) -> None:
            self._segments.free(address)

        functions = _ALLOCATE(allocate), _FREE(free)
        _functions.extend(functions)
        pointers = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
        return torch._C._cuda_customAllocator(*pointers)


def _timed(move: Any) -> Transfer:
    started_s = time.perf_counter()
    num_bytes = move()
    return Transfer(num_bytes, time.perf_counter() - started_s)


_COPIES_AHEAD = 4
"""Copies that are on their way before memory is freed behind the first of them: the bus is never idle."""


@dataclass(slots=True, eq=False)
class Segment:
    """A range of addresses; contents are saved if it `keeps` them, or zeros after waking. Without memory no handle."""

    address: int
    size_bytes: int
    keeps: bool
    handle: object | None


class Segments:
    """All segments of a model; `chunk_bytes` of the host's memory are pinned at once."""

    def __init__(self, driver: CUDADriver, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._driver, self._chunk_bytes = driver, chunk_bytes
        self._segments: dict[int, Segment] = {}
        self._asleep: list[Segment] | None = None  # with memory before, in the order of their saved contents
        self._host: HostMemory | None = None

    def allocate(self, size_bytes: int, *, keeps: bool) -> int:
        """Memory at new addresses; returns the first. KernelError: the driver has none."""
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
            self.close()
            raise
        self._asleep = there
        return size

    def wake(self) -> int:
        """Put memory to the same addresses again, with what was kept; returns the bytes copied.

        Raises KernelError where the GPU has too little memory; the model is asleep as before.
        """
        if self._asleep is None:
            raise RuntimeError("the model is not asleep")
        self._restore(self._asleep)
        copied = sum(each.size_bytes for each in self._asleep if each.keeps)
        self._asleep = None
        return copied

    def close(self) -> None:
        """Give the host's memory back; segments are freed by `free`."""
        host, self._host = self._host, None
        if host is not None:
            with suppress(KernelError):
                self._driver.synchronize()
            host.close()

    def _prepare_host(self, size: int) -> None:
        if self._host is not None and self._host.size_bytes != size:
            self.close()
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
            assert self._host is not None  # where anything is kept
            for part in self._host.parts(offset, each.size_bytes):
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
                assert self._host is not None
                for part in self._host.parts(start, each.size_bytes):
                    self._driver.copy_to_device(each.address + part.start, part.address, part.size_bytes)
            self._driver.synchronize()
        except BaseException:
            with suppress(KernelError):
                self._driver.synchronize()
            for each in mapped:
                self._unmap(each)
            raise

    def _bring_back(self, segments: Iterable[Segment], error: KernelError) -> None:
        """Undo a half of `_save`; DeviceLostError where the GPU has no memory for it any more."""
        try:
            self._driver.synchronize()
            self._restore(segments)
        except KernelError as second:
            raise DeviceLostError(f"weights are lost: {error}, and then {second}") from second

    def _unmap(self, segment: Segment) -> None:
        handle, segment.handle = segment.handle, None
        if handle is not None:
            self._driver.unmap(segment.address, segment.size_bytes, handle)
