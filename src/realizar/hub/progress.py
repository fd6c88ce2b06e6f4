"""Callbacks for the files of a download and for its progress. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias


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


Announce: TypeAlias = Callable[[Path, Sequence[RemoteFile]], None]
"""Called once, before a download begins, with a folder and all files of the model. It raises HubError if these are not
to be fetched. The folder is on the disk that the files will be on; it may not exist yet."""

Progress: TypeAlias = Callable[[str, int, int | None], None]
"""Called repeatedly during a download, possibly from another thread, with a label, the bytes so far, and all bytes, or
None if unknown. Each label has a bar of its own, and its bytes so far never decrease."""


def ignore_progress(label: str, done: int, total: int | None) -> None:
    """Ignore the progress."""


def ignore_files(folder: Path, files: Sequence[RemoteFile]) -> None:
    """Fetch whatever there is."""
