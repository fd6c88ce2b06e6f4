"""Models that a shell completes: pulled names, short names, and GGUF files and folders. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from realizar.errors import RealizarError

if TYPE_CHECKING:
    from cyclopts.completion import CompletionContext

    from realizar.hub.pull import ListedModel

_MOST_FILES = 200


def complete_model(context: CompletionContext) -> list[str]:
    """Names of models, and paths that go on from the typed word; hidden files are left out."""
    return [*(model.name for model in _models()), *_paths(context.incomplete)]


def complete_pulled_model(_context: CompletionContext) -> list[str]:
    """Names of models that are pulled."""
    return [model.name for model in _models() if model.path is not None]


def _models() -> tuple[ListedModel, ...]:
    from realizar.hub.pull import list_models

    try:
        return list_models()
    except (RealizarError, OSError):
        return ()


def _paths(typed: str) -> Iterator[str]:
    """GGUF files, and folders with a slash at the end, whose paths begin with what is typed."""
    before, slash, name = typed.rpartition("/")
    folder = Path(before + slash).expanduser() if slash else Path()
    try:
        entries = sorted(folder.iterdir())
    except (OSError, RuntimeError, ValueError):
        return
    fitting = [entry for entry in entries if entry.name.startswith(name) and not entry.name.startswith(".")]
    for entry in fitting[:_MOST_FILES]:
        if entry.is_dir():
            yield f"{before}{slash}{entry.name}/"
        elif entry.suffix.lower() == ".gguf":
            yield f"{before}{slash}{entry.name}"
