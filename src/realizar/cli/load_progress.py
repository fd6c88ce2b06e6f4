"""Progress of loading and compiling on stderr: one line that changes on a terminal, else a line per stage."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_QUIET_S = 0.7  # after the first report: a warm start is over before anything is shown
_SILENCE_S = 2.5  # without any report: the compiler is still at work on what it needs to start
_STARTING = "starting; the first run compiles kernels for this processor"


@contextmanager
def load_progress() -> Iterator[Callable[[str, float], None]]:
    """A callback for `LLM` or `load_core`: what is being done, and the share done."""
    shown = _Line() if sys.stderr.isatty() else _Log()
    timer = threading.Timer(_SILENCE_S, shown.show, (_STARTING,))
    timer.daemon = True
    timer.start()
    started_s: float | None = None

    def report(what: str, share: float) -> None:
        nonlocal started_s
        timer.cancel()
        started_s = started_s or time.monotonic()
        if time.monotonic() - started_s >= _QUIET_S:
            shown.show(what if share >= 1 else f"{what} {share:.0%}")

    try:
        yield report
    finally:
        timer.cancel()
        shown.close()


class _Line:
    """Rewrites one line of a terminal."""

    def __init__(self) -> None:
        self._width = 0

    def show(self, text: str) -> None:
        print(f"\r{text:<{self._width}}", end="", file=sys.stderr, flush=True)
        self._width = len(text)

    def close(self) -> None:
        if self._width:
            print(f"\r{'':<{self._width}}\r", end="", file=sys.stderr, flush=True)


class _Log:
    """A line for each new stage."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def show(self, text: str) -> None:
        stage = text.rstrip("%0123456789 ")
        if stage not in self._told:
            self._told.add(stage)
            print(stage, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Lines stay."""
