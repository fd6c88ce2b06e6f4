"""The tensor table of a GGUF file, and its checks against the data section. numpy."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from realizar.checkpoint.checkpoint import StoredTensor
from realizar.checkpoint.ggml_types import REMOVED_TYPES, GGMLType
from realizar.checkpoint.gguf_cursor import Cursor
from realizar.checkpoint.naming import shown
from realizar.errors import CheckpointError

MAX_DIMENSIONS = 4
MAX_TENSORS = 1 << 16
"""Known models have a few thousand; parsing more than this would take over a second."""

_SMALLEST_TENSOR = 8 + 1 + 4 + 4 + 8
_LARGEST_INT64 = (1 << 63) - 1
_DIMENSIONS = tuple(struct.Struct(f"<{count}Q") for count in range(MAX_DIMENSIONS + 1))


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A row of the table. `shape` is slowest dimension first, `offset` counts from the data section."""

    name: str
    ggml_type: GGMLType
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


def count_tensors(cursor: Cursor) -> int:
    """The number of tensors, checked against the bytes left and `MAX_TENSORS`."""
    offset = cursor.position
    count = cursor.count("tensors", _SMALLEST_TENSOR)
    if count > MAX_TENSORS:
        raise cursor.error(offset, f"{count} tensors; at most {MAX_TENSORS} are allowed")
    return count


def read_tensor_table(cursor: Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    """Reads `count` rows.

    Raises:
        CheckpointError: empty or duplicate name, shape, type or offset that is not allowed.
    """
    table: dict[str, TensorInfo] = {}
    for index in range(count):
        offset, cursor.place = cursor.position, f"tensor {index}"
        name = cursor.string("name")
        if not name:
            raise cursor.error(offset, "the name is empty")
        if name in table:
            raise cursor.error(offset, f"duplicate tensor {shown(name)}")
        cursor.place = f"tensor {shown(name)}"
        table[name] = _read_info(cursor, name, alignment)
    cursor.place = ""
    return table


def _read_info(cursor: Cursor, name: str, alignment: int) -> TensorInfo:
    dimensions, num_elements = _read_dimensions(cursor)
    offset = cursor.position
    ggml_type = _read_type(cursor)
    row = dimensions[0] if dimensions else 1
    if row % ggml_type.block_size:
        reason = f"rows of {row} elements are not a multiple of {ggml_type.name}'s block of {ggml_type.block_size}"
        raise cursor.error(offset, reason)
    size_bytes = num_elements // ggml_type.block_size * ggml_type.type_size
    if size_bytes > _LARGEST_INT64:
        raise cursor.error(offset, f"a size of {size_bytes} bytes overflows 63 bits")
    offset = cursor.position
    data_offset = cursor.u64("data offset")
    if data_offset % alignment:
        raise cursor.error(offset, f"data offset {data_offset} is not a multiple of the alignment {alignment}")
    return TensorInfo(name, ggml_type, dimensions[::-1], data_offset, size_bytes)


def _read_dimensions(cursor: Cursor) -> tuple[tuple[int, ...], int]:
    offset = cursor.position
    count = cursor.u32("number of dimensions")
    if count > MAX_DIMENSIONS:
        raise cursor.error(offset, f"{count} dimensions; at most {MAX_DIMENSIONS} are allowed")
    layout, offset = _DIMENSIONS[count], cursor.position
    dimensions = tuple(int(size) for size in cursor.unpack(layout, "dimensions"))
    num_elements = 1
    for size in dimensions:
        num_elements *= size
    if num_elements == 0:
        raise cursor.error(offset, f"a dimension of {list(dimensions)} is zero")
    if num_elements > _LARGEST_INT64:
        raise cursor.error(offset, f"the product of the dimensions {list(dimensions)} overflows 63 bits")
    return dimensions, num_elements


def _read_type(cursor: Cursor) -> GGMLType:
    offset = cursor.position
    number = cursor.u32("tensor type")
    if number in REMOVED_TYPES:
        raise cursor.error(offset, f"tensor type {number} ({REMOVED_TYPES[number]}) was removed from GGUF")
    try:
        return GGMLType(number)
    except ValueError:
        raise cursor.error(offset, f"unknown tensor type {number}") from None


def place_tensors(cursor: Cursor, table: dict[str, TensorInfo], data_start: int) -> dict[str, StoredTensor]:
    """Views of the data, in the order of the table.

    Raises:
        CheckpointError: data past the end of the file, or two tensors that overlap.
    """
    file = cursor.file
    end, previous = 0, ""
    for info in sorted(table.values(), key=lambda info: info.offset):
        start = data_start + info.offset
        where = f"tensor {shown(info.name)}, offset {start}"
        if start >= file.size:
            raise CheckpointError(file.path, where, f"the data starts past the end of the file ({file.size} bytes)")
        if start + info.size_bytes > file.size:
            reason = f"the data is truncated: {info.size_bytes} bytes, and the file has {file.size - start} left"
            raise CheckpointError(file.path, where, reason)
        if start < end:
            raise CheckpointError(file.path, where, f"the data overlaps that of tensor {shown(previous)}")
        end, previous = start + info.size_bytes, info.name
    return {name: _stored(cursor, info, data_start + info.offset) for name, info in table.items()}


def _stored(cursor: Cursor, info: TensorInfo, start: int) -> StoredTensor:
    view = cursor.file.view(start, info.size_bytes)
    return StoredTensor(info.name, info.ggml_type, info.shape, view, cursor.file.path, start)
