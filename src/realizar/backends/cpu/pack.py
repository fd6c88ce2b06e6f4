"""Matrices as the kernels read them: `Planes` to tiles. The layout stands in `formats`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.formats import FORMATS, GROUP, PLANES, WeightFormat
from realizar.backends.cpu.records import aligned_zeros
from realizar.checkpoint.ggml_types import GGMLType
from realizar.errors import UnsupportedModelError
from realizar.quantization import Planes, to_planes

_CHUNK_WEIGHTS = 1 << 21


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A quantised matrix in tiles.

    Attributes:
        rows, cols: as in the checkpoint; rows are padded with zero weights to whole tiles.
        codes, scales, supers: uint8, 64-byte aligned; their sizes per tile follow from `weight_format`.
        table: uint8 [64], the codebook plus 128 repeated, or None.
    """

    weight_format: WeightFormat
    rows: int
    cols: int
    tiles: int
    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    supers: NDArray[np.uint8]
    table: NDArray[np.uint8] | None

    @property
    def size_bytes(self) -> int:
        return int(self.codes.size + self.scales.size + self.supers.size)


def allocate(name: str, rows: int, cols: int, lanes: int) -> PackedMatrix:
    """An empty matrix of the format of a ggml type.

    Raises:
        UnsupportedModelError: the type has no packed format.
    """
    if name not in FORMATS:
        raise UnsupportedModelError(f"weights of type {name} do not run on the CPU yet")
    form = FORMATS[name]
    tiles = -(-rows // lanes)
    sizes = (form.codes_bytes(lanes, cols), form.scales_bytes(lanes, cols), form.supers_bytes(lanes, cols))
    codes, scales, supers = (aligned_zeros(tiles * size, np.uint8) for size in sizes)
    return PackedMatrix(form, rows, cols, tiles, codes, scales, supers, None)  # type: ignore[arg-type]


def pack(ggml_type: GGMLType, data: NDArray[np.uint8], rows: int, cols: int, lanes: int) -> PackedMatrix:
    """Pack a matrix of any ggml type through its `Planes`, some tiles at a time.

    Args:
        data: uint8, the raw blocks, rows one after another.
        lanes: rows of a tile.
    """
    packed = allocate(ggml_type.name, rows, cols, lanes)
    row_bytes = data.size // rows
    step = max(1, _CHUNK_WEIGHTS // (cols * lanes)) * lanes
    table = None
    for first in range(0, rows, step):
        count = min(step, rows - first)
        planes = to_planes(ggml_type, data[first * row_bytes : (first + count) * row_bytes], count, cols)
        if planes.codebook is not None and table is None:
            table = np.tile((planes.codebook.astype(np.int16) + 128).astype(np.uint8), 4)
        pack_planes(planes, packed, first // lanes, lanes)
    return PackedMatrix(
        packed.weight_format, rows, cols, packed.tiles, packed.codes, packed.scales, packed.supers, table
    )


def pack_planes(planes: Planes, packed: PackedMatrix, first_tile: int, lanes: int) -> None:
    """Write the tiles of some rows, from `first_tile` on."""
    form, cols = packed.weight_format, packed.cols
    tiles = -(-planes.rows // lanes)
    groups = cols // GROUP
    codes = np.zeros((tiles * lanes, cols), np.uint8)
    codes[: planes.rows] = planes.codes
    words = codes.reshape(tiles, lanes, groups, 8, 4)
    size = form.codes_bytes(lanes, cols)
    out = packed.codes[first_tile * size : (first_tile + tiles) * size].reshape(tiles, groups, form.vectors, lanes, 4)
    first_vector, shift = 0, 0
    for bits in PLANES[form.bits]:
        part = (words >> shift) & ((1 << bits) - 1)
        for word in range(8):
            place = bits * (word // bits)
            out[:, :, first_vector + word % bits] |= (part[:, :, :, word] << place).transpose(0, 2, 1, 3)
        first_vector, shift = first_vector + bits, shift + bits
    if form.super_size:
        large = (planes.super_scales, planes.super_minima) if form.small != "none" else (planes.scales, planes.minima)
        _write_scales(large, packed.supers, form.supers_bytes(lanes, cols), first_tile, lanes, _half)
    if form.small != "none":
        convert = {"f16": _half, "e8m0": _e8m0, "e4m3": _e4m3}.get(form.small, _byte)
        small = (planes.scales, planes.minima)
        _write_scales(small, packed.scales, form.scales_bytes(lanes, cols), first_tile, lanes, convert)


def _write_scales(
    values: tuple[NDArray[np.generic] | None, ...],
    target: NDArray[np.uint8],
    size: int,
    first_tile: int,
    lanes: int,
    convert: Callable[[Any], NDArray[np.generic]],
) -> None:
    """Scales and minima [rows, n] to [tiles, n, planes, lanes] of the converted type; `size` bytes per tile."""
    planes = [convert(value) for value in values if value is not None]
    rows, count = planes[0].shape
    tiles = -(-rows // lanes)
    out = target[first_tile * size : (first_tile + tiles) * size].view(planes[0].dtype)
    out = out.reshape(tiles, count, len(planes), lanes)
    for index, plane in enumerate(planes):
        padded = np.zeros((tiles * lanes, count), plane.dtype)
        padded[:rows] = plane
        out[:, :, index] = padded.reshape(tiles, lanes, count).transpose(0, 2, 1)


def _half(values: NDArray[np.float32]) -> NDArray[np.float16]:
    """float16, which holds ggml's scales exactly."""
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
