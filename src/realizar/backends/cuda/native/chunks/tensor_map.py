"""How Hopper's copy engine finds boxes of rows in device memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

from realizar.backends.cuda.native.launcher import checked, driver_module
from realizar.errors import KernelError

_BYTES, _ALIGNED = 128, 64  # of a map: its size, and what its address must be a multiple of
_TYPES = {"bf16": ("BFLOAT16", 2), "f16": ("FLOAT16", 2), "u8": ("UINT8", 1)}
_DRIVER_VERSION = 12000  # the first that has the call


class TensorMap:
    """A map, which a kernel takes as a parameter by value (`t` in `Kernel.launch`).

    A copy of a box writes runs of 64 elements, 64 or 128 bytes, interleaved over eight rows as matrix instructions read
    them, and zeros where the box lies outside.

    Args:
        address: of the first element. element: `bf16`, `f16` or `u8`.
        sizes: elements along each dimension; along the first they lie side by side.
        strides: bytes, of all dimensions but the first; multiples of 16.
        box: elements of a copy along each dimension, at most 256; 64 along the first.

    Raises KernelError where the driver refuses it.
    """

    def __init__(
        self, address: int, element: str, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
    ) -> None:
        driver, rank, (name, size) = driver_module(), len(sizes), _TYPES[element]
        swizzle = getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{64 * size}B")
        self._memory = ctypes.create_string_buffer(_BYTES + _ALIGNED)
        self._at = -(-ctypes.addressof(self._memory) // _ALIGNED) * _ALIGNED
        status = _encode()(
            self._at, int(getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{name}")), rank,
            address, (ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * rank)(*strides),
            (ctypes.c_uint32 * rank)(*box), (ctypes.c_uint32 * rank)(*[1] * rank),
            int(driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
            int(swizzle),
            int(driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B),
            int(driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        )  # fmt: skip
        if status:
            raise KernelError(f"a map of {tuple(sizes)} elements: the driver refuses it ({status})")

    def getPtr(self) -> int:  # noqa: N802 (the name that cuda-bindings asks for)
        return self._at


@cache
def _encode() -> Any:
    """`cuTensorMapEncodeTiled` as it is: what cuda-bindings makes lies at addresses that it does not take."""
    found = driver_module().cuGetProcAddress(b"cuTensorMapEncodeTiled", _DRIVER_VERSION, 0)
    address = checked(found, "finding cuTensorMapEncodeTiled")
    pointer, number = ctypes.c_void_p, ctypes.c_int
    return ctypes.CFUNCTYPE(
        number, pointer, number, ctypes.c_uint32, pointer, pointer, pointer, pointer, pointer, *[number] * 4
    )(address)
