"""Matrices that are held as `Planes`: made in memory, of any layout. numpy only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.errors import UnsupportedModelError
from realizar.quantization.layout import WeightLayout
from realizar.quantization.microscaling import half_e4m3
from realizar.quantization.planes import Planes
from realizar.quantization.source import MatrixSource

_SMALL: dict[str, tuple[int, int]] = {"i8": (-32, 32), "u8": (0, 64), "u4": (0, 16), "odd4": (0, 16)}
"""Small scales of each type, from the first number to before the second."""


class PlanesSource(MatrixSource):
    """A matrix whose planes are at hand; there are no raw bytes."""

    def __init__(self, layout: WeightLayout, planes: Planes, name: str = "matrix") -> None:
        super().__init__(layout, planes.out_features, planes.in_features, Path("memory"), name)
        self._planes = planes

    def planes(self, start: int, stop: int) -> Planes:
        return self._planes.slice_out_features(start, stop)


def random_source(
    layout: WeightLayout, out_features: int, in_features: int, rng: np.random.Generator, std: float
) -> PlanesSource:
    """A random matrix of a layout: every code occurs, and the weights' root mean square is about `std`.

    Raises:
        UnsupportedModelError: the layout has no codes.
        ValueError: the columns are not a whole number of blocks.
    """
    if layout.is_float:
        raise UnsupportedModelError(f"weights in the layout {layout.name} are not codes")
    layout.row_bytes(in_features)
    once = _random_planes(layout, out_features, in_features, rng, 1.0)
    factor = std / float(np.sqrt(np.mean(np.square(once.dequantize(), dtype=np.float64))))
    return PlanesSource(layout, _random_planes(layout, out_features, in_features, rng, factor))


def _random_planes(
    layout: WeightLayout, out_features: int, in_features: int, rng: np.random.Generator, factor: float
) -> Planes:
    vector, book = layout.vector_size, layout.codebook
    codes: NDArray[Any] = rng.integers(0, 1 << layout.bits, (out_features, in_features // vector))
    groups = out_features, in_features // layout.group_size
    outer = None if layout.super_group_size is None else (out_features, in_features // layout.super_group_size)
    scales, minima = _scales(layout, groups, rng, factor)
    supers = None if outer is None else _floats(outer, rng, factor)
    return Planes(
        codes=codes.astype(np.uint8) if vector == 1 else codes.astype(np.uint16),
        bits=layout.bits,
        offset=layout.offset,
        group_size=layout.group_size,
        scales=scales,
        minima=minima,
        super_group_size=layout.super_group_size,
        super_scales=supers,
        super_minima=-_floats(outer, rng, factor) if outer is not None and minima is not None else None,
        codebook=None if book is None else book.load(),
        signs=rng.integers(0, 256, (out_features, in_features // 8), np.uint8) if layout.signs else None,
    )


def _scales(
    layout: WeightLayout, groups: tuple[int, int], rng: np.random.Generator, factor: float
) -> tuple[NDArray[Any], NDArray[Any] | None]:
    if layout.super_group_size is not None:
        first, stop = _SMALL[layout.scale]
        small = rng.integers(first, stop, (2, *groups)).astype(np.int16)
        if layout.scale == "odd4":
            small = small * np.int16(2) + np.int16(1)
        return small[0], small[1] if layout.minimum else None
    scales = _floats(groups, rng, factor)
    if layout.scale == "e8m0":
        scales = np.exp2(np.rint(np.log2(scales))).astype(np.float32)
    elif layout.scale == "e4m3":
        table = half_e4m3()[:127]
        scales = table[np.searchsorted(table[:-1], scales)]
    if layout.centred:
        return 2 * scales, -scales
    middle = np.float32(((1 << layout.bits) - 1) / 2 - layout.offset)
    return scales, (-middle * scales).astype(np.float16).astype(np.float32) if layout.minimum else None


def _floats(shape: tuple[int, int], rng: np.random.Generator, factor: float) -> NDArray[np.float32]:
    return (factor * rng.uniform(0.8, 1.2, shape)).astype(np.float16).astype(np.float32)
