"""Callbacks for the files of a download and for its progress. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a model that is fetched.

    Attributes:
        label: as `Progress` gets it.
        size_bytes: None if it is not known.
        missing_bytes: room that fetching it takes; 0 if it is here already, or if the size is not known.
        digest: `sha256:` or, for a small file of a repository, git's `sha1:` and hexadecimal digits; None if unknown.
    """

    label: str
    size_bytes: int | None
    missing_bytes: int
    digest: str | None


class Announce(Protocol):
    """A callback that is called once, before a download begins. It raises HubError if the files are not to be fetched.

    `folder` is on the disk that the files will be on; it may not exist yet. `files` are all of the model.
    """

    def __call__(self, folder: Path, files: Sequence[RemoteFile]) -> None: ...


class Progress(Protocol):
    """A callback that is called repeatedly during a download, possibly from another thread.

    Each `label` has a bar of its own. `done` are the bytes so far, which never decrease; `total` is None if unknown.
    """

    def __call__(self, label: str, done: int, total: int | None) -> None: ...


def ignore_progress(label: str, done: int, total: int | None) -> None:
    """Ignore the progress."""


def ignore_files(folder: Path, files: Sequence[RemoteFile]) -> None:
    """Fetch whatever there is."""
