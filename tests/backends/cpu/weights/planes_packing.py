"""Packing by numpy from `Planes`: the specification of the compiled repacking."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.weights.formats import GROUP, PLANES
from realizar.backends.cpu.weights.pack import PackedMatrix, allocate
from realizar.checkpoint.ggml_types import GGMLType
from realizar.quantization import to_planes


def pack_planes(ggml_type: GGMLType, data: NDArray[np.uint8], rows: int, cols: int, lanes: int) -> PackedMatrix:
    """As `pack`, for the types whose codes are split into planes of bits."""
    packed = allocate(ggml_type.name, rows, cols, lanes)
    planes, form = to_planes(ggml_type, data, rows, cols), packed.weight_format
    codes = np.zeros((packed.tiles * lanes, cols), np.uint8)
    codes[:rows] = planes.codes
    words = codes.reshape(packed.tiles, lanes, cols // GROUP, 8, 4)
    out = packed.codes.reshape(packed.tiles, cols // GROUP, form.vectors, lanes, 4)
    first_vector, shift = 0, 0
    for bits in PLANES[form.bits]:
        part = (words >> shift) & ((1 << bits) - 1)
        for word in range(8):
            place = bits * (word // bits)
            out[:, :, first_vector + word % bits] |= (part[:, :, :, word] << place).transpose(0, 2, 1, 3)
        first_vector, shift = first_vector + bits, shift + bits
    small: tuple[NDArray[Any] | None, ...] = (planes.scales, planes.minima)
    if form.super_size:
        large = (planes.super_scales, planes.super_minima) if form.small != "none" else small
        if form.centred:
            large = (planes.scales / 2, None)
        _write(large, packed.supers, rows, lanes, _half)
    if form.small == "u4":
        small = (planes.scales | planes.minima << 4, None)
    if form.small != "none":
        _write(small, packed.scales, rows, lanes, {"f16": _half, "e8m0": _e8m0, "e4m3": _e4m3}.get(form.small, _byte))
    return packed


def _write(
    values: tuple[NDArray[Any] | None, ...], target: NDArray[np.uint8], rows: int, lanes: int,
    convert: Callable[[Any], NDArray[np.generic]],
) -> None:  # fmt: skip
    """Scales and minima [rows, n] to [tiles, n, planes, lanes] of the converted type."""
    planes = [convert(value) for value in values if value is not None]
    count, tiles = planes[0].shape[1], -(-rows // lanes)
    out = target.view(planes[0].dtype).reshape(tiles, count, len(planes), lanes)
    for index, plane in enumerate(planes):
        padded = np.zeros((tiles * lanes, count), plane.dtype)
        padded[:rows] = plane
        out[:, :, index] = padded.reshape(tiles, lanes, count).transpose(0, 2, 1)


def _half(values: NDArray[np.float32]) -> NDArray[np.float16]:
    return values.astype(np.float16)


def _byte(values: NDArray[np.int16]) -> NDArray[np.uint8]:
    return values.astype(np.uint8)


def _e8m0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Powers of two to their exponent plus 128."""
    return (np.frexp(values)[1] + 127).astype(np.uint8)


def _e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Halves of the non-negative e4m3 numbers to their seven bits."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    numbers = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9) / 2
    return np.searchsorted(numbers, values).astype(np.uint8)
