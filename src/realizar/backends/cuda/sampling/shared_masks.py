"""`SharedMasks`: a table of masks in memory that other processes write, read by the device where it lies. torch."""

from __future__ import annotations

import logging
import mmap

import numpy as np
import torch
from numpy.typing import NDArray

_LOG = logging.getLogger(__name__)


class SharedMasks:
    """Locks the pages of the table that it was asked for last, so that kernels read it with no work of the host."""

    def __init__(self) -> None:
        self._table: NDArray[np.uint32] | None = None  # also keeps its memory mapped while its pages are locked
        self._address: int | None = None

    def address(self, table: NDArray[np.uint32]) -> int | None:
        """Where the device reads the table; None if its pages can't be locked.

        Args:
            table: uint32 [lines, words]; begins at a page, and its last page is its own.
        """
        if table is not self._table:
            self.release()
            self._table, self._address = table, _lock(table)
        return self._address

    def release(self) -> None:
        """Unlock the pages, once no kernel reads them. Idempotent."""
        if self._address is not None and self._table is not None:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._table.ctypes.data)
        self._table = self._address = None


def _lock(table: NDArray[np.uint32]) -> int | None:
    """Lock the pages of a table; its address on the device, None where either is refused."""
    size = -(-table.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    fault = int(torch.cuda.cudart().cudaHostRegister(table.ctypes.data, size, 0))
    if fault:
        _LOG.info("the pages of masks can't be locked: CUDA's error %d", fault)
        return None
    from cuda.bindings import driver  # with the kernels that read them

    status, address = driver.cuMemHostGetDevicePointer(table.ctypes.data, 0)
    if int(status):
        _LOG.info("the device can't read the pages of masks: %s", status.name)
        torch.cuda.cudart().cudaHostUnregister(table.ctypes.data)
        return None
    return int(address)
