"""`MaskMemory`: memory that the engine's process shares with the processes of grammars, where masks are put."""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np
from numpy.typing import NDArray


class MaskMemory:
    """An unnamed file that all these processes have open, mapped as far as it is used.

    Args:
        descriptor: of a file made elsewhere; None makes one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _unnamed_file() if descriptor is None else descriptor
        self._map: mmap.mmap | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes that are mapped here."""
        return 0 if self._map is None else len(self._map)

    def grow(self, size_bytes: int) -> None:
        """Make the file as large, if it is smaller. For its owner, while nobody writes."""
        if size_bytes > self.size_bytes:
            size_bytes = max(size_bytes, 2 * self.size_bytes, 1 << 16)
            os.ftruncate(self.descriptor, size_bytes)
            self.map(size_bytes)

    def map(self, size_bytes: int) -> None:
        """Map so many bytes, which the file has, if fewer are mapped."""
        if size_bytes > self.size_bytes:
            self._map = mmap.mmap(self.descriptor, size_bytes)

    def words(self, offset_bytes: int, num_rows: int, num_words: int) -> NDArray[np.uint32]:
        """A view: uint32 [num_rows, num_words]."""
        if self._map is None:
            raise ValueError("nothing is mapped")
        found = np.frombuffer(self._map, np.uint32, num_rows * num_words, offset_bytes)
        return found.reshape(num_rows, num_words)

    def close(self) -> None:
        """Close the file; what is mapped goes with its last view."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor, self._map = -1, None


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):  # Linux
        return os.memfd_create("realizar-masks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
