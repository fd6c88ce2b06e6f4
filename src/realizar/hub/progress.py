"""The callback for the progress of downloads. Standard library only."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """A callback that is called repeatedly during a download, possibly from another thread.

    Args:
        label: name of the download; each label has its own bar.
        done: bytes so far, which never decrease for a label.
        total: bytes in all, or None if unknown.
    """

    def __call__(self, label: str, done: int, total: int | None) -> None: ...


def ignore_progress(label: str, done: int, total: int | None) -> None:
    """Ignore the progress."""
