"""Callbacks for the files of a download and for its progress. Standard library only."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from realizar.errors import HubError
from realizar.sizes import format_bytes


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


def check_room(folder: Path, files: Sequence[RemoteFile], reserve_bytes: int = 0) -> None:
    """It raises HubError if the disk of a folder has no room for files, and for a reserve that stays free."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    needed, free = sum(file.missing_bytes for file in files), shutil.disk_usage(there).free
    if needed and needed + reserve_bytes > free:
        stays = f", of which {format_bytes(reserve_bytes)} stay so" if reserve_bytes else ""
        raise HubError(f"the model takes {format_bytes(needed)} of disk, and {format_bytes(free)} are free{stays}")
