"""`MappedFile`: a regular file mapped for reading, with views instead of copies. numpy."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from realizar.errors import CheckpointError


class CutShortError(CheckpointError):
    """The file ends before its header does."""


class MappedFile:
    """A whole file mapped read-only. The map lives as long as any view of it.

    Raises CheckpointError where the file is missing, unreadable, empty or not a regular file. Pipes and devices are
    refused before they are opened, because opening one may block for ever.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise CheckpointError(path, "file", "not a regular file")
            with path.open("rb") as stream:
                self.size = os.fstat(stream.fileno()).st_size
                if self.size == 0:
                    raise CheckpointError(path, "offset 0", "the file is empty")
                self.buffer = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise CheckpointError(path, "file", f"cannot be opened: {reason}") from error
        self._bytes: NDArray[np.uint8] = np.frombuffer(self.buffer, dtype=np.uint8)

    def view(self, offset: int, size: int) -> NDArray[np.uint8]:
        """uint8 [size], read-only. The caller has checked that the range lies inside the file."""
        return self._bytes[offset : offset + size]

    def release(self, offset: int, size: int) -> None:
        """Drops the pages wholly inside the range from this process. The system may keep them cached."""
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (offset + size) // mmap.PAGESIZE * mmap.PAGESIZE
        self._advise("MADV_DONTNEED", start, stop)

    def prefetch(self, offset: int, size: int) -> None:
        """Asks the system to read the range ahead, without waiting for it."""
        self._advise("MADV_WILLNEED", offset // mmap.PAGESIZE * mmap.PAGESIZE, offset + size)

    def _advise(self, name: str, start: int, stop: int) -> None:
        option = getattr(mmap, name, None)  # Absent outside Unix: advice is only advice.
        if option is not None and stop > start:
            self.buffer.madvise(option, start, stop - start)
