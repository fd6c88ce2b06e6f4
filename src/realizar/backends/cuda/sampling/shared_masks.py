"""`SharedMasks`: a table of masks in memory that other processes write, read by the device where it lies. torch."""

from __future__ import annotations

import logging
import mmap

import numpy as np
import torch
from numpy.typing import NDArray

_LOG = logging.getLogger(__name__)


class SharedMasks:
    """Locks the pages of the table that it was asked for last, so that a copy to the device waits for nothing."""

    def __init__(self) -> None:
        self._table: NDArray[np.uint32] | None = None  # also keeps its memory mapped while its pages are locked
        self._lines = torch.zeros((0, 0), dtype=torch.int32)
        self._is_locked = False

    def lines(self, table: NDArray[np.uint32], *, lock: bool) -> torch.Tensor:
        """The table as a tensor, int32 [lines, words], of the same memory.

        Args:
            table: begins at a page, and its last page is its own.
            lock: lock its pages; where that is not possible, copies take longer.
        """
        if table is not self._table:
            self.release()
            self._table, self._lines = table, torch.from_numpy(table.view(np.int32))
            if lock:
                size = -(-table.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
                fault = int(torch.cuda.cudart().cudaHostRegister(table.ctypes.data, size, 0))
                self._is_locked = fault == 0
                if fault:
                    _LOG.info("the pages of masks can't be locked: CUDA's error %d", fault)
        return self._lines

    def release(self) -> None:
        """Unlock the pages. Idempotent."""
        if self._is_locked and self._table is not None:
            torch.cuda.cudart().cudaHostUnregister(self._table.ctypes.data)
        self._table, self._is_locked = None, False
        self._lines = torch.zeros((0, 0), dtype=torch.int32)
