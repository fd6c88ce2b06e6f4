"""`LoadMemory`: where a load's tensors lie, so that their memory can be given back while the model sleeps. torch."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from realizar.backends.base import Transfer
from realizar.backends.cuda.sleep.driver import CUDADriver
from realizar.backends.cuda.sleep.segments import Segments
from realizar.errors import RealizarError, UnsupportedModelError

_LOG = logging.getLogger(__name__)
_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_functions: list[Any] = []  # torch calls them for as long as the process lives


class LoadMemory:
    """Memory of a model that stays on its device: tensors lie wherever torch puts them."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A part of the load whose tensors keep their contents while the model sleeps. Parts don't nest."""
        yield

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """A part of the load whose tensors are zeros after waking."""
        yield

    def sleep(self) -> Transfer:
        """See `backends.base.Sleeps`."""
        raise UnsupportedModelError("the model was not loaded so that its weights can wait in the host's memory")

    def wake(self) -> Transfer:
        """See `backends.base.Sleeps`."""
        raise UnsupportedModelError("the model was not loaded so that its weights can wait in the host's memory")

    def close(self) -> None:
        """Give all memory back, once no tensor lies in it."""


class SleepingMemory(LoadMemory):
    """Memory of a model that can sleep. Each part of its load has a pool of torch's with segments of ours.

    Args:
        device: a GPU; its context is current.

    Raises:
        UnsupportedModelError: torch was built for another maker's GPUs.
    """

    def __init__(self, device: torch.device) -> None:
        if torch.version.hip is not None:
            raise UnsupportedModelError("weights can wait in the host's memory with NVIDIA's GPUs alone")
        self._segments = Segments(CUDADriver(device))
        self._allocators = {keeps: self._allocator(keeps=keeps) for keeps in (True, False)}
        self._pools: list[Any] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """See `LoadMemory`."""
        with self._part(keeps=True):
            yield

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """See `LoadMemory`."""
        with self._part(keeps=False):
            yield

    def sleep(self) -> Transfer:
        """See `backends.base.Sleeps`."""
        return _timed(self._segments.sleep)

    def wake(self) -> Transfer:
        """See `backends.base.Sleeps`."""
        return _timed(self._segments.wake)

    def close(self) -> None:
        """See `LoadMemory`."""
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
        """An allocator of torch's that asks for segments."""

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
