"""Progress of loading and compiling on stderr: a changing line on a terminal, otherwise a line for each stage."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from realizar.backends.load_progress import LoadProgress
from realizar.cli.terminal.printable import printable

_QUIET_S = 0.7  # after the first report, so that a warm start shows nothing
_SILENCE_S = 2.5  # without any report, when modules are read from a slow disk or on a busy machine
_STARTING = "starting"


@contextmanager
def load_progress() -> Iterator[LoadProgress]:
    """Yield a progress callback for `LLM` or `load_core`; its arguments are the stage and the share done."""
    shown = _Shown(_Line() if sys.stderr.isatty() else _Log())
    try:
        yield shown.report
    finally:
        shown.close()


class _Shown:
    """Shows reports once loading takes longer than a warm start."""

    def __init__(self, display: _Line | _Log) -> None:
        self._display, self._lock = display, threading.Lock()
        self._first_s: float | None = None
        self._latest, self._closed = _STARTING, False
        self._timer = self._start_timer(_SILENCE_S)

    def report(self, what: str, share: float) -> None:
        with self._lock:
            self._latest = printable(what) if share >= 1 else f"{printable(what)} {share:.0%}"
            now_s = time.monotonic()
            if self._first_s is None:
                self._first_s = now_s
                self._timer.cancel()
                self._timer = self._start_timer(_QUIET_S)  # shows the latest, should no other follow for long
            if now_s - self._first_s >= _QUIET_S:
                self._timer.cancel()
                self._display.show(self._latest)

    def close(self) -> None:
        with self._lock:
            self._timer.cancel()
            self._closed = True
            self._display.close()

    def _start_timer(self, delay_s: float) -> threading.Timer:
        timer = threading.Timer(delay_s, self._show_latest)
        timer.daemon = True
        timer.start()
        return timer

    def _show_latest(self) -> None:
        with self._lock:
            if not self._closed:
                self._display.show(self._latest)


class _Line:
    def __init__(self) -> None:
        self._shown = ""

    def show(self, text: str) -> None:
        if text != self._shown:  # the timer may show what a report has shown
            print(f"\r{text:<{len(self._shown)}}", end="", file=sys.stderr, flush=True)
            self._shown = text

    def close(self) -> None:
        if self._shown:
            print(f"\r{'':<{len(self._shown)}}\r", end="", file=sys.stderr, flush=True)


class _Log:
    def __init__(self) -> None:
        self._stages: set[str] = set()

    def show(self, text: str) -> None:
        stage = text.rstrip("%0123456789 ")
        if stage not in self._stages:
            self._stages.add(stage)
            print(stage, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Lines stay."""
