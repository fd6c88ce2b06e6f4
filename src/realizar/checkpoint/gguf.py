"""`read_gguf`: a GGUF file, or all parts of a split one, as a `Checkpoint`. numpy.

Source of the layout: the GGUF specification (`docs/gguf.md` of ggml); of split files: llama.cpp's `gguf-split`.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.ggml_types import REMOVED_TYPES, GGMLType
from realizar.checkpoint.gguf_cursor import Cursor
from realizar.checkpoint.gguf_metadata import ValueType, count_pairs, read_metadata
from realizar.checkpoint.mapped_file import MappedFile
from realizar.checkpoint.naming import shown
from realizar.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
_LARGEST_INT32 = (1 << 31) - 1
ALIGNMENT_KEY = "general.alignment"
_ARCHITECTURE_KEY = "general.architecture"
_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Part:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf(path: Path) -> Checkpoint:
    """Opens a GGUF file of version 2 or 3, little-endian. Of a split model `path` is the first part.

    Raises CheckpointError where the file is malformed; the message names file, place and reason.
    """
    first = _read_part(path)
    parts = [first, *_read_other_parts(path, first)]
    architecture = first.metadata.get(_ARCHITECTURE_KEY)
    if not isinstance(architecture, str) or not architecture:
        reason = "missing" if architecture is None else "must be a string that is not empty"
        raise CheckpointError(path, f"key '{_ARCHITECTURE_KEY}'", reason)
    tensors: dict[str, StoredTensor] = {}
    for part in parts:
        for name, tensor in part.tensors.items():
            if name in tensors:
                reason = f"duplicate tensor, already in {tensors[name].path.name}"
                raise CheckpointError(tensor.path, f"tensor {shown(name)}", reason)
            tensors[name] = tensor
    for part in parts:
        _check_split_total(part, len(tensors))
    return Checkpoint(path=path, format="gguf", metadata=first.metadata, tensors=tensors)


def _read_part(path: Path) -> _Part:
    cursor = Cursor(MappedFile(path))
    metadata, table, data_start = _read_header(cursor)
    tensors = _place_tensors(cursor, table, data_start)
    cursor.file.release(0, cursor.position)
    return _Part(path, metadata, tensors)


def check_gguf_header(file: MappedFile) -> None:
    """Read a file's header alone. CutShortError: the file ends in it; CheckpointError: it is malformed."""
    _read_header(Cursor(file))


def _read_header(cursor: Cursor) -> tuple[dict[str, Any], dict[str, _TensorInfo], int]:
    """Metadata, tensor table, and the offset of the data section."""
    _check_prologue(cursor)
    num_tensors = _count_tensors(cursor)
    metadata, types = read_metadata(cursor, count_pairs(cursor))
    alignment = _alignment(cursor.file.path, metadata, types)
    table = _read_tensor_table(cursor, num_tensors, alignment)
    return metadata, table, -(-cursor.position // alignment) * alignment


def _check_prologue(cursor: Cursor) -> None:
    start = cursor.skip(4, "magic")
    magic = cursor.file.buffer[start : start + 4]
    if magic == MAGIC[::-1]:
        raise cursor.error(0, "the file is byte-swapped (big-endian), which is not supported")
    if magic != MAGIC:
        raise cursor.error(0, f"not a GGUF file: magic {magic!r} instead of {MAGIC!r}")
    version = cursor.u32("version")
    if version in VERSIONS:
        return
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version and version & 0xFFFF == 0:
        raise cursor.error(4, f"the file is byte-swapped (big-endian GGUF version {swapped}), which is not supported")
    raise cursor.error(4, f"GGUF version {version} is not supported; versions 2 and 3 are")


def _alignment(path: Path, metadata: dict[str, Any], types: dict[str, ValueType]) -> int:
    if ALIGNMENT_KEY not in metadata:
        return DEFAULT_ALIGNMENT
    where, kind, value = f"key '{ALIGNMENT_KEY}'", types[ALIGNMENT_KEY], metadata[ALIGNMENT_KEY]
    if kind is not ValueType.UINT32:
        raise CheckpointError(path, where, f"the type is {kind.name.lower()} and must be uint32")
    if value == 0 or value & (value - 1):
        raise CheckpointError(path, where, f"an alignment of {value} is not a power of two")
    if value > MAX_ALIGNMENT:
        raise CheckpointError(path, where, f"an alignment of {value} exceeds the limit of {MAX_ALIGNMENT}")
    return int(value)


def _read_other_parts(path: Path, first: _Part) -> list[_Part]:
    count = _split_number(first, "split.count", 1)  # 0 in a file that was merged from parts
    number = _split_number(first, "split.no", 0)
    if count <= 1 and number == 0:
        return []
    if number >= count:
        stated = count if "split.count" in first.metadata else "missing"
        reason = f"this is part {number + 1} of a model whose split.count is {stated}"
        raise CheckpointError(path, "key 'split.no'", reason)
    if number != 0:
        reason = f"this is part {number + 1} of {count}; open the first part, whose name ends in -00001-of-{count:05}"
        raise CheckpointError(path, "key 'split.no'", reason)
    match = _PART_NAME.fullmatch(path.name)
    if match is None or int(match["number"]) != 1 or int(match["count"]) != count:
        reason = f"the model has {count} parts, so this file's name must end in -00001-of-{count:05}.gguf"
        raise CheckpointError(path, "key 'split.count'", reason)
    parts = []
    for index in range(1, count):
        sibling = path.with_name(f"{match['stem']}-{index + 1:05}-of-{count:05}.gguf")
        if not sibling.exists():
            raise CheckpointError(sibling, "file", f"part {index + 1} of {count} is missing")
        part = _read_part(sibling)
        own_index = _split_number(part, "split.no", 0)
        if own_index != index or _split_number(part, "split.count", 0) != count:
            raise CheckpointError(sibling, "key 'split.no'", f"this is not part {index + 1} of {count}")
        parts.append(part)
    return parts


def _split_number(part: _Part, key: str, default: int) -> int:
    value = part.metadata.get(key, default)
    if type(value) is not int or not 0 <= value <= _LARGEST_INT32:
        raise CheckpointError(part.path, f"key '{key}'", f"must be a whole number from 0 to {_LARGEST_INT32}")
    return value


def _check_split_total(part: _Part, num_tensors: int) -> None:
    announced = _split_number(part, "split.tensors.count", num_tensors)
    if announced != num_tensors:
        reason = f"{announced} tensors are announced, but the model has {num_tensors}"
        raise CheckpointError(part.path, "key 'split.tensors.count'", reason)


# The tensor table of a GGUF file, and its checks against the data section.

_MAX_DIMENSIONS = 4
_MAX_TENSORS = 1 << 16
"""Known models have a few thousand; parsing more than this would take over a second."""

_SMALLEST_TENSOR = 8 + 1 + 4 + 4 + 8
_LARGEST_INT64 = (1 << 63) - 1
_DIMENSIONS = tuple(struct.Struct(f"<{count}Q") for count in range(_MAX_DIMENSIONS + 1))


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    """A row of the table. `shape` is slowest dimension first, `offset` counts from the data section."""

    name: str
    ggml_type: GGMLType
    shape: tuple[int, ...]
    offset: int
    size_bytes: int


def _count_tensors(cursor: Cursor) -> int:
    offset = cursor.position
    count = cursor.count("tensors", _SMALLEST_TENSOR)
    if count > _MAX_TENSORS:
        raise cursor.error(offset, f"{count} tensors; at most {_MAX_TENSORS} are allowed")
    return count


def _read_tensor_table(cursor: Cursor, count: int, alignment: int) -> dict[str, _TensorInfo]:
    """Raises CheckpointError for an empty or duplicate name, or a shape, type or offset that is not allowed."""
    table: dict[str, _TensorInfo] = {}
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


def _read_info(cursor: Cursor, name: str, alignment: int) -> _TensorInfo:
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
    return _TensorInfo(name, ggml_type, dimensions[::-1], data_offset, size_bytes)


def _read_dimensions(cursor: Cursor) -> tuple[tuple[int, ...], int]:
    offset = cursor.position
    count = cursor.u32("number of dimensions")
    if count > _MAX_DIMENSIONS:
        raise cursor.error(offset, f"{count} dimensions; at most {_MAX_DIMENSIONS} are allowed")
    layout, offset = _DIMENSIONS[count], cursor.position
    dimensions = tuple(int(size) for size in cursor.unpack(layout, "dimensions"))
    num_elements = math.prod(dimensions)
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


def _place_tensors(cursor: Cursor, table: dict[str, _TensorInfo], data_start: int) -> dict[str, StoredTensor]:
    """Views in the order of the table; CheckpointError for data past the end of the file, or tensors that overlap."""
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
    return {name: _stored(file, info, data_start + info.offset) for name, info in table.items()}


def _stored(file: MappedFile, info: _TensorInfo, start: int) -> StoredTensor:
    view = file.view(start, info.size_bytes)
    return StoredTensor(info.name, info.ggml_type, info.shape, view, file.path, start, file=file)
