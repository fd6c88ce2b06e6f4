"""How a download tells how far it is. Standard library only."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called now and then during a download, possibly from another thread.

    Args:
        label: what is being fetched; one bar per label.
        done: bytes so far, never falling for a label.
        total: bytes in all, or None where unknown.
    """

    def __call__(self, label: str, done: int, total: int | None) -> None: ...


def ignore_progress(label: str, done: int, total: int | None) -> None:
    """The progress of someone who does not watch."""
