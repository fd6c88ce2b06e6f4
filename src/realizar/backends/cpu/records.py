"""Argument records of the kernels: int64 fields in order, packed by name. The order here is what kernels index by."""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray


class Record:
    """A named list of int64 fields. `Record("tokens out")` makes fields `tokens` 0 and `out` 1."""

    def __init__(self, fields: str) -> None:
        self.names = tuple(fields.split())
        self.index = {name: position for position, name in enumerate(self.names)}

    def __getitem__(self, name: str) -> int:
        return self.index[name]

    def pack(self, values: dict[str, int | float]) -> NDArray[np.int64]:
        """int64 [fields]; a float becomes a float32 in a field's first four bytes. KeyError: missing or unknown."""
        unknown = set(values) ^ set(self.names)
        if unknown:
            raise KeyError(f"fields missing or unknown: {sorted(unknown)}")
        return np.array([_field(values[name]) for name in self.names], np.int64)


def _field(value: int | float) -> int:
    if isinstance(value, float):
        return int(struct.unpack("<q", struct.pack("<fi", value, 0))[0])
    return int(value)


def address(array: NDArray[np.generic] | None) -> int:
    return 0 if array is None else int(array.ctypes.data)


def aligned_zeros(count: int, dtype: type[np.generic] | str, alignment: int = 64) -> NDArray[np.generic]:
    """A zeroed one-dimensional array whose first byte is aligned."""
    size = int(count) * np.dtype(dtype).itemsize
    raw = np.zeros(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size].view(dtype)
