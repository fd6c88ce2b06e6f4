"""`read_safetensors`: a folder or file of safetensors weights as a `Checkpoint`. numpy."""

from __future__ import annotations

import logging
import os
from pathlib import Path, PurePosixPath

from realizar.checkpoint.checkpoint import Checkpoint, StoredTensor
from realizar.checkpoint.file_json import read_json_object
from realizar.checkpoint.hf_config import read_folder_metadata
from realizar.checkpoint.mapped_file import MappedFile
from realizar.checkpoint.naming import shown
from realizar.checkpoint.safetensors_file import SafetensorsFile, read_safetensors_file
from realizar.errors import CheckpointError

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
MAX_INDEX_BYTES = 16 << 20

logger = logging.getLogger(__name__)


def read_safetensors(path: Path) -> Checkpoint:
    """Opens a folder, a single `.safetensors` file, or a shard (then all that its index names).

    A folder's weights are `model.safetensors`, else the files that `model.safetensors.index.json` names, else its
    only `.safetensors` file. A folder without weights gives a checkpoint without tensors.

    Raises:
        CheckpointError: a file is malformed, missing, or points outside the folder.
    """
    folder = path if path.is_dir() else path.parent
    single = find_single_file(folder) if path.is_dir() else path
    index = folder / INDEX_NAME
    shard_of: dict[str, Path] = {}
    if index.exists() and (single is None or single.name != SINGLE_NAME):
        shard_of = _read_index(index)
        if single is not None and single not in shard_of.values():
            shard_of = {}
    if shard_of:
        return _checkpoint(folder, *_read_shards(index, shard_of))
    if single is None:
        return _checkpoint(folder, [], {})
    file = read_safetensors_file(single)
    return _checkpoint(folder, [file.file], file.tensors)


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


def _checkpoint(folder: Path, files: list[MappedFile], tensors: dict[str, StoredTensor]) -> Checkpoint:
    by_path = {file.path: file for file in files}
    tokenizer = folder / "tokenizer.json"
    return Checkpoint(
        path=folder,
        format="safetensors",
        metadata=read_folder_metadata(folder),
        tensors=tensors,
        tokenizer_path=tokenizer if tokenizer.exists() else None,
        release=lambda tensor: by_path[tensor.path].release(tensor.offset, tensor.size_bytes),
        prefetch=lambda tensor: by_path[tensor.path].prefetch(tensor.offset, tensor.size_bytes),
    )


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


def _read_shards(index: Path, shard_of: dict[str, Path]) -> tuple[list[MappedFile], dict[str, StoredTensor]]:
    shards: dict[Path, SafetensorsFile] = {path: read_safetensors_file(path) for path in sorted(set(shard_of.values()))}
    tensors: dict[str, StoredTensor] = {}
    for name, path in shard_of.items():
        if name not in shards[path].tensors:
            raise CheckpointError(index, f"tensor {shown(name)}", f"{path.name} does not hold it")
        tensors[name] = shards[path].tensors[name]
    for path, shard in shards.items():
        extra = sorted(name for name in shard.tensors if shard_of.get(name) != path)
        if extra:
            logger.warning(
                "%s: %d tensors that %s does not name, such as %s", path, len(extra), index.name, shown(extra[0])
            )
    return [shard.file for shard in shards.values()], tensors
