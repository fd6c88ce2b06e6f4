"""`PlainMatrix`: a quantised matrix row by row, as the Triton kernels read it. numpy and torch.

Codes lie in bytes from the lowest bit on, one plane of 1, 2, 4 or 8 bits, or two: 3 bits are 2 + 1, 5 are 4 + 1, 6 are
4 + 2. Indices of vector codebooks are uint16. Scales keep their two levels; each array takes the smallest of its types
that holds it exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from realizar.backends.cuda.layouts.fragments import PLANES
from realizar.backends.cuda.weights.store import Store
from realizar.backends.machine import num_processors
from realizar.errors import UnsupportedModelError
from realizar.quantization.planes import Planes
from realizar.quantization.source import MatrixSource

_WEIGHTS_AT_ONCE = 4 << 20


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    """A packed matrix.

    Attributes:
        arrays: the kernels' pointers by name; an array that the layout lacks is one element that nothing reads.
        constants: the kernels' compile-time arguments.
    """

    out_features: int
    in_features: int
    arrays: Mapping[str, torch.Tensor]
    constants: Mapping[str, Any]

    @property
    def size_bytes(self) -> int:
        return sum(array.numel() * array.element_size() for array in self.arrays.values() if array.numel() > 1)


def pack_plain(source: MatrixSource, device: torch.device) -> PlainMatrix:
    """Pack a quantised matrix and send it to `device`; runs of out_features are packed by several threads.

    Raises UnsupportedModelError where its codes have a width that kernels do not read.
    """
    layout, out_features, cols = source.layout, source.out_features, source.in_features
    if layout.vector_size == 1 and layout.bits not in PLANES:
        raise UnsupportedModelError(
            f"weights in the layout {layout.name} do not run on CUDA: codes have {layout.bits} bits"
        )
    step = max(1, _WEIGHTS_AT_ONCE // cols)

    def part(first: int) -> tuple[dict[str, NDArray[Any] | None], dict[str, Any]]:
        return _arrays(source.planes(first, min(first + step, out_features)))

    with ThreadPoolExecutor(min(8, num_processors())) as pool:
        parts = list(pool.map(part, range(0, out_features, step)))
    found = {name: _runs(name, [each for each, _ in parts]) for name in parts[0][0]}
    constants = parts[0][1]
    del parts
    store = Store((_joined_bytes(runs) for runs in found.values()), device)
    # One array after the other is joined and sent, so that the host never holds all of the matrix twice.
    arrays = {name: _send(found.pop(name), store) for name in list(found)}
    return PlainMatrix(out_features, cols, arrays, constants)


def _runs(name: str, parts: Sequence[Mapping[str, NDArray[Any] | None]]) -> list[NDArray[Any]]:
    """An array of all parts, in order; of a codebook, which all share, the first; one zero for what is not there."""
    first = parts[0][name]
    if first is None:
        return [np.zeros(1, np.int8)]
    return [first] if name == "codebook" else [each for part in parts if (each := part[name]) is not None]


def _joined_bytes(runs: Sequence[NDArray[Any]]) -> int:
    return sum(each.size for each in runs) * np.result_type(*runs).itemsize


def stack_plain(matrices: Sequence[PlainMatrix]) -> PlainMatrix:
    """Matrices of one layout and width, one below the other."""
    first = matrices[0]
    if len(matrices) == 1:
        return first
    arrays = {
        name: array if array.numel() == 1 or name == "codebook" else torch.cat([each.arrays[name] for each in matrices])
        for name, array in first.arrays.items()
    }
    return PlainMatrix(sum(each.out_features for each in matrices), first.in_features, arrays, first.constants)


def _arrays(planes: Planes) -> tuple[dict[str, NDArray[Any] | None], dict[str, Any]]:
    layout, vector = planes.layout, planes.layout.vector_size
    book = layout.codebook
    low, high = (16, 0) if vector > 1 else (*PLANES[layout.bits], 0)[:2]
    return {
        "low": planes.codes.astype(np.int16) if vector > 1 else _bits(planes.codes & ((1 << low) - 1), low),
        "high": _bits(planes.codes >> low, high) if high else None,
        "small": _smallest(planes.scales),
        "small_minima": None if planes.minima is None else _smallest(planes.minima),
        "supers": None if planes.super_scales is None else _smallest(planes.super_scales),
        "super_minima": None if planes.super_minima is None else _smallest(planes.super_minima),
        "codebook": None if book is None else book.load(),
        "signs": planes.signs,
    }, {
        "LOW": low, "HIGH": high, "OFFSET": layout.offset, "GROUP": layout.group_size,
        "SUPER": layout.super_group_size or 0, "MINIMA": planes.minima is not None, "VECTOR": vector,
        "CODEBOOK": book is not None and vector == 1, "SIGNS": planes.signs is not None,
    }  # fmt: skip


def _bits(codes: NDArray[Any], width: int) -> NDArray[np.uint8]:
    """uint8 [out_features, cols * width / 8]."""
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


def _send(runs: list[NDArray[Any]], store: Store) -> torch.Tensor:
    host = torch.from_numpy(np.concatenate(runs))
    runs.clear()
    return store.take(host.nbytes).view(host.dtype).reshape(host.shape).copy_(host)
