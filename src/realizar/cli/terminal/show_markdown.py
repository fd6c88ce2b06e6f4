"""`show_markdown` prints an answer on a terminal with its markdown rendered."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from realizar.cli.terminal.printable import shown_answer
from realizar.engine.clients.interrupts import interrupts_deferred


def renders_markdown() -> bool:
    """True if stdout is a terminal that can take lines back; those in editors, for one, can't (`TERM=dumb`)."""
    return sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def show_markdown(deltas: Iterator[str]) -> None:
    """Print deltas as they arrive; control characters are escaped. The cursor begins a line afterwards."""
    from rich.console import Console  # which a command's help does not need

    from realizar.cli.terminal.markdown_stream import MarkdownStream

    console = Console(file=sys.stdout, highlight=False, emoji=False, markup=False)
    stream = MarkdownStream(console)
    try:
        for delta in deltas:
            if delta:
                with interrupts_deferred():  # half an escape sequence would be shown as text
                    stream.feed(shown_answer(delta))
    finally:
        with interrupts_deferred():
            stream.close()
