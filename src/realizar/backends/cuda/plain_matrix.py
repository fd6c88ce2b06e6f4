"""`PlainMatrix`: a quantised matrix row by row, as the Triton kernels read it. numpy and torch.

Codes lie in bytes from the lowest bit on, one plane of 1, 2, 4 or 8 bits, or two: 3 bits are 2 + 1, 5 are 4 + 1, 6 are
4 + 2. Indices of vector codebooks are uint16. Scales keep their two levels; each array takes the smallest of its types
that holds it exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.quantization.planes import Planes

_WIDTHS = {1: (1, 0), 2: (2, 0), 3: (2, 1), 4: (4, 0), 5: (4, 1), 6: (4, 2), 8: (8, 0)}


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    """A packed matrix.

    Attributes:
        rows, cols: its shape.
        arrays: the kernels' pointers by name; an array that the type lacks is one element that nothing reads.
        constants: the kernels' compile-time arguments.
    """

    rows: int
    cols: int
    arrays: Mapping[str, torch.Tensor]
    constants: Mapping[str, Any]

    @property
    def size_bytes(self) -> int:
        return sum(array.numel() * array.element_size() for array in self.arrays.values() if array.numel() > 1)


def pack_plain(planes: Planes, device: torch.device) -> PlainMatrix:
    """Pack a matrix and send it to `device`."""
    vector, scalar_codebook = planes.vector_size, planes.codebook is not None and planes.codebook.ndim == 1
    low, high = (16, 0) if vector > 1 else _WIDTHS[planes.bits]
    arrays: dict[str, NDArray[Any] | None] = {
        "low": planes.codes.astype(np.int16) if vector > 1 else _bits(planes.codes & ((1 << low) - 1), low),
        "high": _bits(planes.codes >> low, high) if high else None,
        "small": _smallest(planes.scales),
        "small_minima": None if planes.minima is None else _smallest(planes.minima),
        "supers": None if planes.super_scales is None else _smallest(planes.super_scales),
        "super_minima": None if planes.super_minima is None else _smallest(planes.super_minima),
        "codebook": planes.codebook,
        "signs": planes.signs,
    }
    return PlainMatrix(
        planes.rows,
        planes.cols,
        {name: _send(array, device) for name, array in arrays.items()},
        {
            "LOW": low, "HIGH": high, "OFFSET": planes.offset, "GROUP": planes.group_size,
            "SUPER": planes.super_group_size or 0, "MINIMA": planes.minima is not None, "VECTOR": vector,
            "CODEBOOK": scalar_codebook, "SIGNS": planes.signs is not None,
        },
    )  # fmt: skip


def _bits(codes: NDArray[Any], width: int) -> NDArray[np.uint8]:
    """uint8 [rows, cols * width / 8]."""
    per_byte = 8 // width
    parts = codes.astype(np.uint8).reshape(codes.shape[0], -1, per_byte)
    packed = np.zeros(parts.shape[:2], np.uint8)
    for place in range(per_byte):
        packed |= parts[:, :, place] << np.uint8(place * width)
    return packed


def _smallest(values: NDArray[Any]) -> NDArray[Any]:
    """The values in int8 or float16 where that is exact."""
    small = np.int8 if values.dtype == np.int16 else np.float16
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.astype(small)
    return narrow if np.array_equal(narrow.astype(values.dtype), values) else values


def _send(array: NDArray[Any] | None, device: torch.device) -> torch.Tensor:
    if array is None:
        return torch.zeros(1, dtype=torch.int8, device=device)
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
