"""The cache folder of models, with a lock for each model. Standard library and filelock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

from realizar.errors import HubError
from realizar.hub.folders import user_cache


def folder_bytes(folder: Path) -> int:
    """Files and folders may vanish meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):  # skips folders that are removed meanwhile
        for name in names:
            with suppress(OSError):
                total += (Path(parent) / name).stat().st_size
    return total


def models_dir() -> Path:
    return user_cache() / "models"


@contextmanager
def locked(name: str) -> Iterator[Path]:
    """Hold the lock of one model and yield its folder, created. `name` is a folder name, unique to the model.

    It raises HubError if the cache can't be written.
    """
    folder = models_dir() / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(models_dir() / f"{name}.lock"):
            yield folder
    except OSError as error:  # also while it is held: the disk is full
        raise HubError(f"the model cache {models_dir()} can't be written: {error.strerror or error}") from error
