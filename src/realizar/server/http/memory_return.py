"""Returns memory to the system. By default glibc keeps the memory of large texts, for each thread."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_LARGE_BYTES = 256 << 10
_ARENAS = 2


def keep_little_memory() -> None:
    """Configure glibc, at the start of a process, to return large blocks to the system. No effect without glibc."""
    library = _glibc()
    if library is not None:
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)  # also stops glibc from raising the threshold
        library.mallopt(_M_ARENA_MAX, _ARENAS)


def return_memory() -> None:
    """Return free memory to the system, which takes some milliseconds. No effect without glibc."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@functools.cache
def _glibc() -> Any:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None
