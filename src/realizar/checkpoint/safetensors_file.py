"""One `.safetensors` file: its header checked, its tensors as views. numpy.

Source of the layout: the format section of the README of huggingface/safetensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realizar.checkpoint.checkpoint import StoredTensor
from realizar.checkpoint.file_json import parse_json_object
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.mapped_file import MappedFile
from realizar.checkpoint.naming import shown
from realizar.errors import CheckpointError

MAX_HEADER_BYTES = 8 << 20
"""Stricter than the format's 100 MB, because parsing that costs seconds and gigabytes. 75,000 tensors fit."""

_PREFIX_BYTES = 8
_METADATA_KEY = "__metadata__"
_LARGEST_INT64 = (1 << 63) - 1

_BITS: dict[str, int] = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""Bits of an element of every dtype of the format."""

_GGML_TYPES: dict[str, GGMLType] = {
    "F16": GGMLType.F16,
    "BF16": GGMLType.BF16,
    "F32": GGMLType.F32,
    "F64": GGMLType.F64,
    "I8": GGMLType.I8,
    "I16": GGMLType.I16,
    "I32": GGMLType.I32,
    "I64": GGMLType.I64,
}


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A checked file and its tensors by name."""

    file: MappedFile
    tensors: dict[str, StoredTensor]


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_safetensors_file(path: Path) -> SafetensorsFile:
    """Opens a file and checks that its tensors tile the data section exactly.

    Raises:
        CheckpointError: header too large, not JSON or inconsistent; unknown dtype; holes, overlaps, truncated data.
    """
    file = MappedFile(path)
    data_start, header = _read_header(file)
    metadata = header.pop(_METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(path, f"key '{_METADATA_KEY}'", "must be an object of strings")
    entries = [_read_entry(file, name, value, data_start) for name, value in header.items()]
    _check_tiling(file, entries, data_start)
    return SafetensorsFile(file, {entry.name: _stored(file, entry) for entry in entries})


def _stored(file: MappedFile, entry: _Entry) -> StoredTensor:
    view, ggml_type = file.view(entry.start, entry.stop - entry.start), _GGML_TYPES.get(entry.dtype)
    return StoredTensor(entry.name, ggml_type, entry.shape, view, file.path, entry.start, entry.dtype)


def _read_header(file: MappedFile) -> tuple[int, dict[str, Any]]:
    if file.size < _PREFIX_BYTES:
        raise CheckpointError(file.path, "offset 0", f"the file is too short for a header: {file.size} bytes")
    size = int.from_bytes(file.buffer[:_PREFIX_BYTES], "little")
    if size > MAX_HEADER_BYTES:
        reason = f"a header of {size} bytes exceeds the limit of {MAX_HEADER_BYTES >> 20} MiB"
        raise CheckpointError(file.path, "offset 0", reason)
    if size > file.size - _PREFIX_BYTES:
        reason = f"a header of {size} bytes would run past the end of the file"
        raise CheckpointError(file.path, "offset 0", reason)
    data_start = _PREFIX_BYTES + size
    if size == 0 or file.buffer[_PREFIX_BYTES] != ord("{"):
        reason = "not a safetensors file: the header is not a JSON object"
        raise CheckpointError(file.path, f"offset {_PREFIX_BYTES}", reason)
    return data_start, parse_json_object(file.path, file.buffer[_PREFIX_BYTES:data_start], _PREFIX_BYTES)


def _read_entry(file: MappedFile, name: str, value: Any, data_start: int) -> _Entry:
    def error(reason: str) -> CheckpointError:
        return CheckpointError(file.path, f"tensor {shown(name)}", reason)

    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise error("the name is not valid text") from None
    if not name:
        raise error("the name is empty")
    if not isinstance(value, dict):
        raise error("its header entry is not an object")
    dtype, shape, offsets = value.get("dtype"), _sizes(value.get("shape")), _sizes(value.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise error(f"unknown dtype {shown(str(dtype))}")
    if shape is None:
        raise error("the shape is not a list of whole numbers")
    if offsets is None or len(offsets) != 2:
        raise error("the data offsets are not two whole numbers")
    num_elements = math.prod(shape)
    if num_elements > _LARGEST_INT64:
        raise error("the product of the dimensions overflows 63 bits")
    start, stop = offsets
    data_size = file.size - data_start
    if start > stop or stop > data_size:
        raise error(f"data offsets {list(offsets)} do not lie in the data section of {data_size} bytes")
    if num_elements * _BITS[dtype] != (stop - start) * 8:
        raise error(f"{dtype} of shape {list(shape)} does not take the {stop - start} bytes of its data offsets")
    return _Entry(name, dtype, shape, data_start + start, data_start + stop)


def _sizes(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(item) is int and 0 <= item <= _LARGEST_INT64 for item in value):
        return tuple(value)
    return None


def _check_tiling(file: MappedFile, entries: list[_Entry], data_start: int) -> None:
    end, previous = data_start, "the header"
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        where = f"tensor {shown(entry.name)}, offset {entry.start}"
        if entry.start < end:
            raise CheckpointError(file.path, where, f"the data overlaps {previous}")
        if entry.start > end:
            raise CheckpointError(file.path, where, f"a hole of {entry.start - end} bytes between it and {previous}")
        end, previous = entry.stop, f"tensor {shown(entry.name)}"
    if end != file.size:
        raise CheckpointError(
            file.path, f"offset {end}", f"{file.size - end} bytes after the last tensor belong to no tensor"
        )
