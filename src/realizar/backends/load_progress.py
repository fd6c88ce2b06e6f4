"""`LoadProgress`: how whoever loads a model learns how far it is. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

LoadProgress: TypeAlias = Callable[[str, float], None]
"""Called with the stage of a load, such as `loading weights`, and the share of it that is done, 0 to 1."""


def no_progress(_what: str, _share: float) -> None:
    """For those that nobody watches."""


def report_weights(total_bytes: int, progress: LoadProgress) -> Callable[[int], None]:
    """A function to call with the bytes of each matrix that is loaded; it reports the share of all."""
    done_bytes = 0

    def loaded(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        progress("loading weights", min(1.0, done_bytes / max(1, total_bytes)))

    return loaded
