"""`read_gguf`: a GGUF file, or all parts of a split one, as a `Checkpoint`. numpy.

Source of the layout: the GGUF specification (`docs/gguf.md` of ggml); of split files: llama.cpp's `gguf-split`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.gguf_cursor import Cursor
from realizar.checkpoint.gguf_metadata import ValueType, count_pairs, read_metadata
from realizar.checkpoint.gguf_tensors import count_tensors, place_tensors, read_tensor_table
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
    file: MappedFile
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_gguf(path: Path) -> Checkpoint:
    """Opens a GGUF file of version 2 or 3, little-endian. Of a split model `path` is the first part.

    Raises:
        CheckpointError: the file is malformed; the message names file, place and reason.
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
    files = {part.file.path: part.file for part in parts}
    return Checkpoint(
        path=path,
        format="gguf",
        metadata=first.metadata,
        tensors=tensors,
        release=lambda tensor: files[tensor.path].release(tensor.offset, tensor.size_bytes),
        prefetch=lambda tensor: files[tensor.path].prefetch(tensor.offset, tensor.size_bytes),
    )


def _read_part(path: Path) -> _Part:
    file = MappedFile(path)
    cursor = Cursor(file)
    _check_prologue(cursor)
    num_tensors = count_tensors(cursor)
    metadata, types = read_metadata(cursor, count_pairs(cursor))
    alignment = _alignment(path, metadata, types)
    table = read_tensor_table(cursor, num_tensors, alignment)
    data_start = -(-cursor.position // alignment) * alignment
    tensors = place_tensors(cursor, table, data_start)
    file.release(0, cursor.position)
    return _Part(file, metadata, tensors)


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
    count = _split_number(path, first, "split.count", 1)  # 0 in a file that was merged from parts
    number = _split_number(path, first, "split.no", 0)
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
        own_index = _split_number(sibling, part, "split.no", 0)
        if own_index != index or _split_number(sibling, part, "split.count", 0) != count:
            raise CheckpointError(sibling, "key 'split.no'", f"this is not part {index + 1} of {count}")
        parts.append(part)
    return parts


def _split_number(path: Path, part: _Part, key: str, default: int) -> int:
    value = part.metadata.get(key, default)
    if type(value) is not int or not 0 <= value <= _LARGEST_INT32:
        raise CheckpointError(path, f"key '{key}'", f"must be a whole number from 0 to {_LARGEST_INT32}")
    return value


def _check_split_total(part: _Part, num_tensors: int) -> None:
    announced = _split_number(part.file.path, part, "split.tensors.count", num_tensors)
    if announced != num_tensors:
        reason = f"{announced} tensors are announced, but the model has {num_tensors}"
        raise CheckpointError(part.file.path, "key 'split.tensors.count'", reason)
