"""`read_safetensors`: a folder or file of safetensors weights as a `Checkpoint`. numpy."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.file_json import parse_json_object, read_json_object
from realizar.checkpoint.ggml_types import GGMLType
from realizar.checkpoint.hf_config import read_folder_metadata
from realizar.checkpoint.mapped_file import CutShortError, MappedFile
from realizar.checkpoint.naming import shown
from realizar.errors import CheckpointError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_INDEX_BYTES = 16 << 20

logger = logging.getLogger(__name__)


def read_safetensors(path: Path) -> Checkpoint:
    """Opens a folder, a single `.safetensors` file, or a shard (then all that its index names).

    A folder's weights are `model.safetensors`, else the files that `model.safetensors.index.json` names, else its only
    `.safetensors` file. A folder without weights gives a checkpoint without tensors. Raises CheckpointError: a file is
    malformed, missing, or points outside the folder.
    """
    folder = path if path.is_dir() else path.parent
    single = find_single_file(folder) if path.is_dir() else path
    index = folder / INDEX_NAME
    shard_of: dict[str, Path] = {}
    if index.exists() and (single is None or single.name != SINGLE_NAME):
        shard_of = _read_index(index)
        if single is not None and single not in shard_of.values():
            shard_of = {}
    alone = {} if single is None or shard_of else _read_safetensors_file(single)
    tokenizer = folder / "tokenizer.json"
    return Checkpoint(
        path=folder,
        format="safetensors",
        metadata=read_folder_metadata(folder),
        tensors=_read_shards(index, shard_of) if shard_of else alone,
        tokenizer_path=tokenizer if tokenizer.exists() else None,
    )


def find_single_file(folder: Path) -> Path | None:
    """`model.safetensors`, or the only file of that suffix where there is no index."""
    if (folder / SINGLE_NAME).exists():
        return folder / SINGLE_NAME
    if (folder / INDEX_NAME).exists():
        return None
    files = sorted(folder.glob("*.safetensors"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise CheckpointError(folder, "folder", f"several safetensors files and no {INDEX_NAME}: {names}")
    return files[0] if files else None


def _read_index(index: Path) -> dict[str, Path]:
    """Tensor name to shard, every shard checked to lie in the folder."""
    weight_map = read_json_object(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(index, "key 'weight_map'", "must be an object that names the file of each tensor")
    shards: dict[str, Path] = {}
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str):
            raise CheckpointError(index, f"tensor {shown(name)}", "its file name is not text")
        if file_name not in shards:
            shards[file_name] = _shard_path(index, name, file_name)
    return {name: shards[file_name] for name, file_name in weight_map.items()}


def _shard_path(index: Path, tensor: str, file_name: str) -> Path:
    where = f"tensor {shown(tensor)}"
    plain = PurePosixPath(file_name)
    if not file_name.isprintable() or "\\" in file_name or plain.suffix != ".safetensors":
        raise CheckpointError(index, where, f"{shown(file_name)} is not a name of a safetensors file")
    path = index.parent / plain
    if plain.is_absolute() or ".." in plain.parts or not _is_inside(index.parent, path):
        raise CheckpointError(index, where, f"the file {shown(file_name)} lies outside the folder")
    if not path.exists():
        raise CheckpointError(path, "file", f"missing; {index.name} names it for {where}")
    return path


def _is_inside(folder: Path, path: Path) -> bool:
    """True if the file is in the folder after following links, or in the blobs of the hub cache that it is part of."""
    root = Path(os.path.realpath(folder))
    allowed = [root]
    if root.parent.name == "snapshots":  # <cache>/models--a--b/snapshots/<revision> links to <cache>/models--a--b/blobs
        allowed.append(root.parent.parent / "blobs")
    real = Path(os.path.realpath(path))
    return any(real.is_relative_to(place) for place in allowed)


def _read_shards(index: Path, shard_of: dict[str, Path]) -> dict[str, StoredTensor]:
    shards = {path: _read_safetensors_file(path) for path in sorted(set(shard_of.values()))}
    tensors: dict[str, StoredTensor] = {}
    for name, path in shard_of.items():
        if name not in shards[path]:
            raise CheckpointError(index, f"tensor {shown(name)}", f"{path.name} does not hold it")
        tensors[name] = shards[path][name]
    for path, shard in shards.items():
        extra = sorted(name for name in shard if shard_of.get(name) != path)
        if extra:
            logger.warning(
                "%s: %d tensors that %s does not name, such as %s", path, len(extra), index.name, shown(extra[0])
            )
    return tensors


# One `.safetensors` file: its header checked, its tensors as views. numpy.
#
# Source of the layout: the format section of the README of huggingface/safetensors.

_MAX_HEADER_BYTES = 8 << 20
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

_GGML_TYPES = {name: GGMLType[name] for name in ("F16", "BF16", "F32", "F64", "I8", "I16", "I32", "I64")}


def _read_safetensors_file(path: Path) -> dict[str, StoredTensor]:
    """Opens a file and checks that its tensors tile the data section exactly.

    Raises CheckpointError where the header is malformed, or offsets do not fit.
    """
    file = MappedFile(path)
    data_start, header = _read_header(file)
    metadata = header.pop(_METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(path, f"key '{_METADATA_KEY}'", "must be an object of strings")
    tensors = {name: _read_entry(file, name, value, data_start) for name, value in header.items()}
    _check_tiling(file, tensors.values(), data_start)
    return tensors


def check_safetensors_header(file: MappedFile) -> None:
    """Read a file's header alone. CutShortError: the file ends in it; CheckpointError: it is malformed."""
    _read_header(file)


def _read_header(file: MappedFile) -> tuple[int, dict[str, Any]]:
    if file.size < _PREFIX_BYTES:
        raise CutShortError(file.path, "offset 0", f"the file is too short for a header: {file.size} bytes")
    size = int.from_bytes(file.buffer[:_PREFIX_BYTES], "little")
    if size > _MAX_HEADER_BYTES:
        reason = f"a header of {size} bytes exceeds the limit of {_MAX_HEADER_BYTES >> 20} MiB"
        raise CheckpointError(file.path, "offset 0", reason)
    if size > file.size - _PREFIX_BYTES:
        reason = f"a header of {size} bytes would run past the end of the file"
        raise CutShortError(file.path, "offset 0", reason)
    data_start = _PREFIX_BYTES + size
    if size == 0 or file.buffer[_PREFIX_BYTES] != ord("{"):
        reason = "not a safetensors file: the header is not a JSON object"
        raise CheckpointError(file.path, f"offset {_PREFIX_BYTES}", reason)
    return data_start, parse_json_object(file.path, file.buffer[_PREFIX_BYTES:data_start], _PREFIX_BYTES)


def _read_entry(file: MappedFile, name: str, value: Any, data_start: int) -> StoredTensor:
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
    view = file.view(data_start + start, stop - start)
    return StoredTensor(name, _GGML_TYPES.get(dtype), shape, view, file.path, data_start + start, dtype, file)


def _sizes(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(item) is int and 0 <= item <= _LARGEST_INT64 for item in value):
        return tuple(value)
    return None


def _check_tiling(file: MappedFile, tensors: Iterable[StoredTensor], data_start: int) -> None:
    end, previous = data_start, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.size_bytes)):
        where = f"tensor {shown(tensor.name)}, offset {tensor.offset}"
        if tensor.offset < end:
            raise CheckpointError(file.path, where, f"the data overlaps {previous}")
        if tensor.offset > end:
            raise CheckpointError(file.path, where, f"a hole of {tensor.offset - end} bytes between it and {previous}")
        end, previous = tensor.offset + tensor.size_bytes, f"tensor {shown(tensor.name)}"
    if end != file.size:
        raise CheckpointError(
            file.path, f"offset {end}", f"{file.size - end} bytes after the last tensor belong to no tensor"
        )
