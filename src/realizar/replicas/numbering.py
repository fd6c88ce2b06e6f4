"""Numbers of choices that are unique over all engines behind one API. Standard library only."""

from __future__ import annotations

_NUMBERS_OF_ONE = 1 << 40  # far more than one engine has choices


def first_number(incarnation: int) -> int:
    """The first number of an engine's choices; engines are counted as they start."""
    return incarnation * _NUMBERS_OF_ONE
