"""Matrices to tiles from their `Planes`: the road of layouts whose own bytes no repacker reads. numpy only.

It is also the specification of the compiled repacking, which gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.weights.formats import GROUP, PLANES, SmallType, WeightFormat
from realizar.quantization import Planes
from realizar.quantization.microscaling import half_e4m3

Tiles = tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint8]]
"""Codes, scales and super-scales of some tiles: uint8, zero before they are written."""


def pack_planes(planes: Planes, weight_format: WeightFormat, lanes: int, tiles: Tiles) -> None:
    """Write some out_features, whole tiles of them or the last of a matrix, into their tiles.

    Args:
        planes: of the out_features.
        weight_format: of the matrix, from the planes' layout; not one that keeps blocks.
        lanes: out_features of a tile.
        tiles: those that the out_features lie in.
    """
    codes, scales, supers = tiles
    _write_codes(planes, weight_format, lanes, codes)
    small: tuple[NDArray[Any] | None, NDArray[Any] | None] = (planes.scales, planes.minima)
    if weight_format.super_size:
        large = (planes.super_scales, planes.super_minima) if weight_format.small != "none" else small
        if weight_format.centred:
            large = (planes.scales / 2, None)
        _write(large, supers, lanes, _half)
    if weight_format.small == "none":
        return
    repeat = max(1, planes.group_size // GROUP)
    if weight_format.small == "u4" and planes.minima is not None:
        small = (planes.scales | planes.minima << 4, None)  # type: ignore[operator]
    wide = [None if values is None else np.repeat(values, repeat, axis=1) for values in small]
    _write((wide[0], wide[1]), scales, lanes, _CONVERTERS[weight_format.small])


def _write_codes(planes: Planes, weight_format: WeightFormat, lanes: int, target: NDArray[np.uint8]) -> None:
    """The bits of codes, plane by plane: the layout stands in `formats`."""
    count = -(-planes.out_features // lanes)
    codes = np.zeros((count * lanes, planes.in_features), np.uint8)
    codes[: planes.out_features] = planes.codes
    words = codes.reshape(count, lanes, planes.in_features // GROUP, 8, 4)
    out = target.reshape(count, planes.in_features // GROUP, weight_format.vectors, lanes, 4)
    first_vector, shift = 0, 0
    for bits in PLANES[weight_format.bits]:
        part = (words >> shift) & ((1 << bits) - 1)
        for word in range(8):
            place = bits * (word // bits)
            out[:, :, first_vector + word % bits] |= (part[:, :, :, word] << place).transpose(0, 2, 1, 3)
        first_vector, shift = first_vector + bits, shift + bits


def _write(
    values: tuple[NDArray[Any] | None, NDArray[Any] | None], target: NDArray[np.uint8], lanes: int,
    convert: Callable[[Any], NDArray[np.generic]],
) -> None:  # fmt: skip
    """Scales and minima [out_features, n] to [tiles, n, scale and minimum, lanes] of the converted type."""
    planes = [convert(value) for value in values if value is not None]
    out_features, count = planes[0].shape
    tiles = -(-out_features // lanes)
    out = target.view(planes[0].dtype).reshape(tiles, count, len(planes), lanes)
    for index, plane in enumerate(planes):
        padded = np.zeros((tiles * lanes, count), plane.dtype)
        padded[:out_features] = plane
        out[:, :, index] = padded.reshape(tiles, lanes, count).transpose(0, 2, 1)


def _half(values: NDArray[np.float32]) -> NDArray[np.float16]:
    return values.astype(np.float16)


def _byte(values: NDArray[np.int16]) -> NDArray[np.uint8]:
    return values.astype(np.uint8)


def _e8m0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Powers of two to their exponent plus 128."""
    exponents: NDArray[np.uint8] = (np.frexp(values)[1] + 127).astype(np.uint8)
    return exponents


def _e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Halves of the non-negative e4m3 numbers to their seven bits."""
    return np.searchsorted(half_e4m3()[:127], values).astype(np.uint8)


_CONVERTERS: dict[SmallType, Callable[[Any], NDArray[Any]]] = {
    "f16": _half, "i8": _byte, "u8": _byte, "u4": _byte, "e8m0": _e8m0, "e4m3": _e4m3,
}  # fmt: skip
