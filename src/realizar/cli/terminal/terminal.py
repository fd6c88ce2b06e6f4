"""The terminal during an answer. Standard library only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


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
