"""Names from a file, made safe for messages. Standard library only."""

from __future__ import annotations

MAX_SHOWN = 80


def shown(name: str) -> str:
    """Quoted, on one line, printable on any terminal, and at most about `MAX_SHOWN` characters long."""
    return ascii(name if len(name) <= MAX_SHOWN else name[: MAX_SHOWN - 3] + "...")
