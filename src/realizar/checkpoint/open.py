"""`open_checkpoint` opens any model path as a `Checkpoint`, by the file's content and not by its name. numpy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.checkpoint.gguf import MAGIC, check_gguf_header, read_gguf
from realizar.checkpoint.mapped_file import CutShortError, MappedFile
from realizar.checkpoint.safetensors import INDEX_NAME, SINGLE_NAME, check_safetensors_header, read_safetensors
from realizar.errors import CheckpointError
from realizar.gguf_names import drafters_of, is_later_part, models_of, quantization_of, towers_of

PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"})
_PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_OLD_MAGICS = (b"lmgg", b"fmgg", b"tjgg", b"algg")
_LFS_START = b"version https://git-lfs."
_PICKLE_REASON = "pickle weights can run code when loaded and are refused; convert the model to safetensors or GGUF"


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a model; CheckpointError where the path does not exist, is of an unknown format, or is malformed.

    Args:
        path: a GGUF file (of a split model the first part), a `.safetensors` file, a `model.safetensors.index.json`, or
            a folder in Hugging Face's layout, or with one GGUF model in it.
    """
    place = Path(path)
    if place.is_dir():
        return _open_folder(place)
    file = MappedFile(place)
    start = file.buffer[: min(file.size, len(_LFS_START))]
    if start.startswith((MAGIC, MAGIC[::-1])):
        return read_gguf(place)
    if place.name == INDEX_NAME:
        return _open_folder(place.parent)
    if start.startswith(_PICKLE_STARTS):
        raise CheckpointError(place, "offset 0", _PICKLE_REASON)
    if start.startswith(_LFS_START):
        raise CheckpointError(place, "offset 0", "this is a Git LFS pointer; fetch the file itself with `git lfs pull`")
    if start.startswith(_OLD_MAGICS):
        raise CheckpointError(place, "offset 0", "this is a GGML file from before GGUF; convert the model to GGUF")
    if start[8:9] == b"{" or place.suffix == ".safetensors":
        return read_safetensors(place)
    if place.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(place, "offset 0", _PICKLE_REASON)
    return read_gguf(place)


def holds_header(path: Path) -> bool:
    """True if the beginning of a model's file, of which no more may be there, holds all that precedes its tensors.

    It is true too of what no model's file begins with. CheckpointError: the header is malformed.
    """
    file = MappedFile(path)
    try:
        if file.buffer[: len(MAGIC)] == MAGIC:
            check_gguf_header(file)
        elif path.suffix == ".safetensors":
            check_safetensors_header(file)
    except CutShortError:
        return False
    return True


def _open_folder(folder: Path) -> Checkpoint:
    names = _names(folder)
    if SINGLE_NAME in names or INDEX_NAME in names or any(name.endswith(".safetensors") for name in names):
        return read_safetensors(folder)
    models = [name for name in models_of(names) if not is_later_part(name)]
    if len(models) == 1:
        return read_gguf(folder / models[0])
    if models:
        raise CheckpointError(
            folder, "folder", f"the folder has {len(models)} GGUF models; name one of them: {', '.join(models[:4])}"
        )
    pickles = [name for name in names if Path(name).suffix in PICKLE_SUFFIXES]
    if pickles:
        raise CheckpointError(folder / pickles[0], "file", _PICKLE_REASON)
    if "config.json" in names or "tokenizer.json" in names:
        return read_safetensors(folder)
    raise CheckpointError(folder, "folder", "the folder has no GGUF or safetensors model")


def find_tower_file(checkpoint: Checkpoint) -> Path | None:
    """The GGUF file of an encoder of images (`mmproj`) beside that of a text model: the first of `towers_of`."""
    return next(_beside(checkpoint, towers_of), None)


def find_drafter_files(checkpoint: Checkpoint) -> tuple[Path, ...]:
    """The GGUF files beside that of a model that may draft for it, best first, as of `drafters_of`."""
    return tuple(_beside(checkpoint, drafters_of))


def _beside(checkpoint: Checkpoint, choose: Callable[[str, list[str]], list[str]]) -> Iterator[Path]:
    if checkpoint.format == "gguf":
        place, model, names = _around(checkpoint.path)
        yield from (place / name for name in choose(model, names))


def _around(model: Path) -> tuple[Path, str, list[str]]:
    """A folder, the name of a model's file below it, and those of all files there.

    Repositories have folders that are named after a quantisation, and above these what all of them share.
    """
    folder = model.parent
    if quantization_of(folder.name) != folder.name.upper():
        return folder, model.name, _names(folder)
    own = [f"{folder.name}/{name}" for name in _names(folder)]
    return folder.parent, f"{folder.name}/{model.name}", own + _names(folder.parent)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise CheckpointError(folder, "folder", f"cannot be read: {error.strerror or error}") from error
