"""`HostMemory`: pinned memory of the host in which the contents of a model's memory wait. numpy."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from realizar.backends.cuda.sleep.driver import CUDADriver
from realizar.backends.machine import num_processors
from realizar.errors import CapacityError
from realizar.sizes import format_bytes

CHUNK_BYTES = 128 << 20
"""Pinned at once: the pages of the next chunks are made by other threads while one is copied to."""
_PAGE_BYTES = 4096
_THREADS = 8


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a range, `start` bytes into it, in one chunk of the host's memory, which the driver copies at once."""

    start: int
    address: int
    size_bytes: int


class HostMemory:
    """Memory of the host, whole pages, pinned by chunks when asked for; CapacityError where the host lacks it."""

    def __init__(self, driver: CUDADriver, size_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._driver, self._chunk_bytes, self.size_bytes = driver, chunk_bytes, size_bytes
        try:
            self._map = map_pages(size_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise CapacityError(f"the host has no {format_bytes(size_bytes)} for a model's weights: {error}") from error
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._pinned: dict[int, int] = {}
        self._threads = ThreadPoolExecutor(min(_THREADS, num_processors()), thread_name_prefix="host-memory")
        self._touched: list[Future[None]] = [
            self._threads.submit(self._touch, chunk) for chunk in range(-(-size_bytes // chunk_bytes))
        ]

    def parts(self, offset: int, size_bytes: int) -> Iterator[Part]:
        """The parts of a range from `offset` on, each pinned when it is given; KernelError: the driver pins no more."""
        done = 0
        while done < size_bytes:
            chunk, within = divmod(offset + done, self._chunk_bytes)
            size = min(self._chunk_bytes - within, size_bytes - done)
            yield Part(done, self._pin(chunk) + within, size)
            done += size

    def close(self) -> None:
        """Give the memory back. Nothing may copy from or to it any more."""
        self._threads.shutdown(cancel_futures=True)
        for address in self._pinned.values():
            self._driver.unpin(address)
        self._pinned.clear()
        del self._bytes
        self._map.close()

    def _pin(self, chunk: int) -> int:
        if chunk not in self._pinned:
            self._touched[chunk].result()
            start = chunk * self._chunk_bytes
            address = int(self._bytes.ctypes.data) + start
            self._driver.pin(address, min(self._chunk_bytes, self.size_bytes - start))
            self._pinned[chunk] = address
        return self._pinned[chunk]

    def _touch(self, chunk: int) -> None:
        start = chunk * self._chunk_bytes
        self._bytes[start : start + self._chunk_bytes : _PAGE_BYTES] = 0


def map_pages(size_bytes: int) -> mmap.mmap:
    """Memory that is to be pinned. The system gives its pages when they are pinned or written.

    Raises OSError, ValueError or OverflowError where the system has no such range of addresses.
    """
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise(memory, "MADV_HUGEPAGE")  # fewer pages are pinned sooner
    _advise(memory, "MADV_DONTFORK")  # a child that shares pages would have the GPU write to the wrong ones
    return memory


def _advise(memory: mmap.mmap, name: str) -> None:
    advice = getattr(mmap, name, None)
    if advice is not None:
        try:
            memory.madvise(advice)
        except OSError:
            return  # a kernel without it
