"""A pull in a process of its own: `python -m realizar.hub.pull_process NAME MMPROJ`, with JSON on stdout.

MMPROJ is that of `EngineConfig`: an encoder of images beside the model comes with `auto`.

A server ends a pull by ending this process, whatever library is downloading. Lines are `{"files": [...]}` with the
fields of `RemoteFile`, then `{"label", "done"}` again and again, then `{"path"}`, `{"error"}`, or `{"unknown"}` where
no model has the name. Standard library only.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from realizar.errors import RealizarError, UnknownModelError
from realizar.hub.progress import RemoteFile, check_room
from realizar.hub.pull import pull_by_name
from realizar.ipc.with_parent import end_with_parent

COMMAND = (sys.executable, "-m", "realizar.hub.pull_process")
RESERVE_BYTES = 1 << 30
"""Room that a pull leaves on its disk."""
_INTERVAL_S = 0.1


class _Lines:
    """Writes lines of JSON, from any thread; those of progress at most every 0.1 s for a file, and at its end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_s: dict[str, float] = {}

    def write(self, **fields: Any) -> None:
        with self._lock:
            sys.stdout.write(json.dumps(fields) + "\n")
            sys.stdout.flush()

    def files(self, folder: Path, files: Sequence[RemoteFile]) -> None:
        check_room(folder, files, RESERVE_BYTES)
        self.write(files=[asdict(file) for file in files])

    def progress(self, label: str, done: int, total: int | None) -> None:
        now_s = time.monotonic()
        if done == total or now_s >= self._next_s.get(label, 0.0):
            self._next_s[label] = now_s + _INTERVAL_S
            self.write(label=label, done=done)


def main(name: str, mmproj: str) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the server's whole group
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # pip is ended on the way out
    end_with_parent(signal.SIGTERM)
    lines = _Lines()
    try:
        last, status = {"path": str(pull_by_name(name, lines.progress, lines.files, towers=mmproj == "auto"))}, 0
    except RealizarError as error:
        last, status = {"unknown" if isinstance(error, UnknownModelError) else "error": str(error)}, 1
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # who has read the last line ends this process, and nothing is left
    lines.write(**last)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
