"""Gives memory back to the machine: glibc keeps what large texts took, for each thread, unless it is told otherwise."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_LARGE_BYTES = 256 << 10
_ARENAS = 2


def keep_little_memory() -> None:
    """For the start of a process: large blocks come from the system and go back to it. Does nothing without glibc."""
    library = _glibc()
    if library is not None:
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)  # also ends its growing with what is freed
        library.mallopt(_M_ARENA_MAX, _ARENAS)


def return_memory() -> None:
    """Give back what is free; some milliseconds. Does nothing without glibc."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@functools.cache
def _glibc() -> Any:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None
