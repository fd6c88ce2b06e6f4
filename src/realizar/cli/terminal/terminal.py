"""The terminal during an answer, and the history of typed lines."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

from realizar.errors import HubError
from realizar.hub.folders import user_state

_KEPT_LINES = 1000
_MOST_BYTES = 1 << 20


@contextmanager
def keys_unseen() -> Iterator[None]:
    """Turn the terminal's echo off during the block; the next prompt gets the typed keys.

    Ctrl-C still works. The function has no effect if stdin is not a terminal.
    """
    try:
        import termios

        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (ImportError, OSError, ValueError, termios.error):  # Windows; a stdin that is closed, a file or a pipe
        yield
        return
    changed = [*before]
    changed[3] &= ~(termios.ECHO | termios.ICANON)  # so that the prompt gets half a line too
    termios.tcsetattr(descriptor, termios.TCSADRAIN, changed)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def history_path() -> Path | None:
    """`$XDG_STATE_HOME/realizar/chat_history`, or below `~/.local/state`; None for a user without a home."""
    try:
        return user_state() / "chat_history"
    except HubError:
        return None


class LineHistory:
    """The history of typed lines for the arrow keys, in a file that only its owner can read.

    Errors of reading or writing the file are ignored. Lines are appended as they are typed, so that two terminals keep
    each other's lines.

    Args:
        path: the file; None keeps the history in this process only.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._readline: ModuleType | None = None
        with suppress(ImportError):
            self._readline = importlib.import_module("readline")  # line editing for input()

    def load(self) -> None:
        """Load the lines of earlier conversations, and drop the oldest ones beyond a thousand."""
        if self._path is None or self._readline is None:
            return
        with suppress(OSError, ValueError):
            if not self._path.is_file() or self._path.stat().st_size > 4 * _MOST_BYTES:
                return
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
            for line in lines[-_KEPT_LINES:]:
                self._readline.add_history(line)
            if len(lines) > 2 * _KEPT_LINES:
                _rewrite(self._path, lines[-_KEPT_LINES:])

    def add(self, line: str) -> None:
        """Add a typed line."""
        if self._path is None or not line.strip() or len(line) > _MOST_BYTES:
            return
        with suppress(OSError, ValueError):
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
                file.write(f"{line}\n")


def _rewrite(path: Path, lines: list[str]) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
        file.write("".join(f"{line}\n" for line in lines))
    partial.replace(path)
