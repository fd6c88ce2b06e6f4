"""Reading and writing memory by address inside kernels, and array views over it."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_I32, _I64 = ir.IntType(32), ir.IntType(64)

# For functions that only kernels call: without the wrapper for Python, which takes longer to compile than many of them.
inner = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@njit(inline="always")
def view(address: int, count: int, dtype: Any) -> Any:
    return carray(_pointer(address), (count,), dtype)


def _elements(kind: Any, stored: Any, stride: int) -> tuple[Any, Any]:
    """Intrinsics that read and write element `index` of an array; `stored` is its type in memory, integers signed."""

    def place(builder: Any, address: Any, index: Any) -> Any:
        at = builder.add(address, builder.mul(index, ir.Constant(_I64, stride)))
        return builder.inttoptr(at, stored.as_pointer())

    def read(typing_context: Any, address: Any, index: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = builder.load(place(builder, *arguments))
            return builder.sext(value, _I64) if stored == _I32 else value

        return kind(types.int64, types.int64), codegen

    def write(typing_context: Any, address: Any, index: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            *at, value = arguments
            builder.store(builder.trunc(value, _I32) if stored == _I32 else value, place(builder, *at))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, kind), codegen

    return intrinsic(read), intrinsic(write)


# Elements of arrays: many times quicker to compile than a view. An int32 is an int64 once it is read.
read_i64, write_i64 = _elements(types.int64, _I64, 8)
read_i32, write_i32 = _elements(types.int64, _I32, 4)
read_f32, write_f32 = _elements(types.float32, ir.FloatType(), 4)
read_f64, write_f64 = _elements(types.float64, ir.DoubleType(), 8)


# Plain loops: slice assignment is many times slower here.


@inner
def clear(address: int, count: int) -> None:
    """Zero `count` float32."""
    values = view(address, count, np.float32)
    for i in range(count):
        values[i] = 0.0


@inner
def copy(source: int, target: int, count: int) -> None:
    """Copy `count` float32."""
    read, written = view(source, count, np.float32), view(target, count, np.float32)
    for i in range(count):
        written[i] = read[i]
