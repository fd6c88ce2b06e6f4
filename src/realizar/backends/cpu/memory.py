"""Reading and writing memory by address inside kernels, and array views over it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# For functions that only kernels call: without the wrapper for Python, which takes longer to compile than many of them.
inner = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    """An address as a pointer that `carray` takes."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@njit(inline="always")
def view(address: int, count: int, dtype: Any) -> Any:
    """A one-dimensional array of `count` elements at `address`."""
    return carray(_pointer(address), (count,), dtype)


@njit(inline="always")
def load_i64(address: int, index: int) -> int:
    """Field `index` of the int64 record at `address`."""
    return carray(_pointer(address), (index + 1,), np.int64)[index]


@njit(inline="always")
def load_f32(address: int, index: int) -> float:
    """Field `index` of the int64 record at `address`, whose first four bytes are a float32."""
    return carray(_pointer(address), (2 * index + 1,), np.float32)[2 * index]


@inner
def clear(address: int, count: int) -> None:
    """Zero `count` float32. A plain loop: slice assignment is many times slower here."""
    values = view(address, count, np.float32)
    for i in range(count):
        values[i] = 0.0
