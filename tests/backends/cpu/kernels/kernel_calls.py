"""Calling single kernels on arrays: argument records by name, and poisoned outputs."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.records import Record, address

POISON = 0xFF  # bytes: a NaN in float32 and float16

_CALL = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


def poisoned(*shape: int) -> NDArray[np.float32]:
    """float32 NaNs: whatever a kernel forgets to write shows."""
    return np.full((*shape, 4), POISON, np.uint8).view(np.float32)[..., 0]


def call(kernel: int, record: Record, threads: int = 1, **fields: Any) -> None:
    """Run a kernel on every thread number in turn; fields may be arrays (their addresses), integers or floats."""
    values = {name: address(value) if isinstance(value, np.ndarray) else value for name, value in fields.items()}
    arguments = record.pack(values)
    for thread in range(threads):
        _CALL(kernel)(address(arguments), thread, threads)
