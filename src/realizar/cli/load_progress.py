"""Progress of loading and compiling on stderr: one line that changes on a terminal, else a line per stage."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_QUIET_S = 0.7  # after the first report: a warm start is over before anything is shown


@contextmanager
def load_progress() -> Iterator[Callable[[str, float], None]]:
    """A callback for `LLM` or `load_core`: what is being done, and the share done."""
    shown = _Line() if sys.stderr.isatty() else _Log()
    try:
        yield shown
    finally:
        shown.close()


class _Line:
    """Rewrites one line of a terminal."""

    def __init__(self) -> None:
        self._started_s: float | None = None
        self._width = 0

    def __call__(self, what: str, share: float) -> None:
        self._started_s = self._started_s or time.monotonic()
        if time.monotonic() - self._started_s < _QUIET_S:
            return
        text = what if share >= 1 else f"{what} {share:.0%}"
        print(f"\r{text:<{self._width}}", end="", file=sys.stderr, flush=True)
        self._width = len(text)

    def close(self) -> None:
        if self._width:
            print(f"\r{'':<{self._width}}\r", end="", file=sys.stderr, flush=True)


class _Log:
    """A line when a stage begins, once a start has turned out to be slow."""

    def __init__(self) -> None:
        self._started_s: float | None = None
        self._told: set[str] = set()

    def __call__(self, what: str, share: float) -> None:
        self._started_s = self._started_s or time.monotonic()
        if time.monotonic() - self._started_s >= _QUIET_S and what not in self._told:
            self._told.add(what)
            print(what, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Lines stay."""
