"""`MaskMemory`: the memory for masks, shared by the engine's process and the grammars' processes."""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np
from numpy.typing import NDArray


class MaskMemory:
    """An unnamed file that all these processes map, as far as it is used.

    Args:
        descriptor: descriptor of an existing file; None makes one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _unnamed_file() if descriptor is None else descriptor
        self._map: mmap.mmap | None = None

    @property
    def size_bytes(self) -> int:
        """The number of bytes mapped in this process."""
        return 0 if self._map is None else len(self._map)

    def grow(self, size_bytes: int) -> None:
        """Grow the file to at least this size. Only its owner may call this; views of before stay as they are."""
        if size_bytes > self.size_bytes:
            size_bytes = max(size_bytes, 2 * self.size_bytes, 1 << 16)
            os.ftruncate(self.descriptor, size_bytes)
            self.map(size_bytes)

    def map(self, size_bytes: int) -> None:
        """Map at least `size_bytes` bytes, which the file must have."""
        if size_bytes > self.size_bytes:
            self._map = mmap.mmap(self.descriptor, size_bytes)

    def words(self, place: int, count: int, num_words: int) -> NDArray[np.uint32]:
        """A view of masks from the one with the number `place` on: uint32 [count, num_words]."""
        if self._map is None:
            raise ValueError("nothing is mapped")
        found = np.frombuffer(self._map, np.uint32, count * num_words, place * num_words * 4)
        return found.reshape(count, num_words)

    def close(self) -> None:
        """Close the file; the mapping lasts until its last view is freed."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor, self._map = -1, None


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):  # Linux
        return os.memfd_create("realizar-masks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
