"""Progress of downloads on stderr: bars on a terminal, otherwise a line at the start and one at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from realizar.cli.terminal.printable import printable
from realizar.hub.progress import Progress
from realizar.sizes import format_bytes

if TYPE_CHECKING:
    from rich.progress import TaskID


@contextmanager
def download_progress() -> Iterator[Progress]:
    """Yield a `Progress` for the hub. rich is imported at the first report, so a cached model does not import it."""
    reporter: _Bars | _Lines = _Bars() if sys.stderr.isatty() else _Lines()
    try:
        yield reporter
    finally:
        reporter.close()


class _Bars:
    def __init__(self) -> None:
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, label: str, done: int, total: int | None) -> None:
        if not self._tasks:
            self._start()
        if label not in self._tasks:
            self._tasks[label] = self._bars.add_task(printable(label), total=total, completed=done)
        self._bars.update(self._tasks[label], completed=done, total=total)

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._bars = Progress(*columns, console=Console(stderr=True))
        self._bars.start()

    def close(self) -> None:
        if self._tasks:
            self._bars.stop()


class _Lines:
    def __init__(self) -> None:
        self._started: dict[str, tuple[int, float]] = {}
        self._finished: set[str] = set()

    def __call__(self, label: str, done: int, total: int | None) -> None:
        now_s = time.monotonic()
        if label not in self._started:
            self._started[label] = done, now_s
            size = "" if total is None else f" ({format_bytes(total)}{f', {format_bytes(done)} here' if done else ''})"
            print(f"fetching {printable(label)}{size}", file=sys.stderr, flush=True)
        if done == total and label not in self._finished:
            self._finished.add(label)
            before, started_s = self._started[label]
            speed = f" ({format_bytes((done - before) / max(now_s - started_s, 1e-3))}/s)" if done > before else ""
            print(f"fetched {printable(label)}{speed}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Do nothing: every line is complete."""
