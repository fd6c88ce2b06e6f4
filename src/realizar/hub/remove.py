"""Removal of a pulled model's files."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from realizar.errors import HubError
from realizar.hub.builtin import BUILTIN_MODELS, BuiltinModel
from realizar.hub.cache import locked, models_dir
from realizar.hub.huggingface import parse_name
from realizar.hub.pull import RECORD_FILE


@dataclass(frozen=True, slots=True)
class Removal:
    """A planned removal of `files`, without those that another pulled model needs.

    `shared_folder` is the folder of Hugging Face's cache, if it has the files; other programs read them too.
    """

    name: str
    files: tuple[Path, ...]
    size_bytes: int
    shared_folder: Path | None = None


def plan_removal(name: str) -> Removal:
    """Plan the removal of a pulled model; nothing is deleted yet.

    It raises HubError if no pulled model has the name, or it is a path.
    """
    builtin = BUILTIN_MODELS.get(name.lower())
    if builtin is not None:
        if not builtin.path.is_file():
            raise HubError(f"{name} is not pulled: there is nothing to remove")
        return Removal(builtin.name, (builtin.path,), builtin.path.stat().st_size)
    repository = parse_name(name)
    if repository is None:
        raise HubError(
            f"{name} is not the name of a pulled model (realizar list shows them); delete other files yourself"
        )
    folder = models_dir() / repository.folder_name
    if not (folder / RECORD_FILE).is_file():
        raise HubError(f"{name} is not pulled: there is nothing to remove")
    others = {
        file for record in models_dir().glob(f"*/{RECORD_FILE}") if record.parent != folder for file in _files(record)
    }
    root = _shared_root()
    files = [file for file in _files(folder / RECORD_FILE) if file not in others and _lies_in(file, root)]
    there = tuple(file for file in files if file.is_file())
    return Removal(str(repository), there, sum(file.stat().st_size for file in there), root)


def remove(removal: Removal) -> None:
    """Delete the planned files; who has the model open is not affected. HubError: the cache can't be written."""
    builtin = BUILTIN_MODELS.get(removal.name)
    if builtin is not None:
        _remove_builtin(builtin)
        return
    repository = parse_name(removal.name)
    if repository is None or removal.shared_folder is None:
        raise HubError(f"{removal.name} is not the name of a pulled model")
    with locked(repository.folder_name) as folder:
        try:
            for file in removal.files:
                _unlink_cached(file, removal.shared_folder)
            shutil.rmtree(folder)
        except OSError as error:
            raise HubError(f"{error.filename or removal.name} can't be deleted: {error.strerror or error}") from error


def _remove_builtin(model: BuiltinModel) -> None:
    with locked(model.folder_name) as folder:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise HubError(f"{error.filename or folder} can't be deleted: {error.strerror or error}") from error


def _files(record: Path) -> list[Path]:
    try:
        return [Path(file) for file in json.loads(record.read_text(encoding="utf-8"))["files"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _shared_root() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _lies_in(file: Path, root: Path) -> bool:
    """True if a record's file is in a repository of the cache. Other paths in a record are not trusted."""
    parts = file.relative_to(root).parts if file.is_relative_to(root) else ()
    return len(parts) >= 4 and parts[0].startswith("models--") and parts[1] == "snapshots" and ".." not in parts


def _unlink_cached(file: Path, root: Path) -> None:
    """Delete a snapshot's file, its content if no other snapshot has it, and empty folders."""
    repository = root / file.relative_to(root).parts[0]
    content = file.resolve()
    file.unlink()
    if content.parent == (repository / "blobs").resolve():
        linked = {link.resolve() for link in (repository / "snapshots").rglob("*") if link.is_symlink()}
        if content not in linked:
            content.unlink(missing_ok=True)
    for parent in file.parents:
        if parent == repository or any(parent.iterdir()):
            break
        parent.rmdir()
    if not (repository / "snapshots").is_dir():
        shutil.rmtree(repository)
