"""`log_to_stderr` sends the lines of a server's log to stderr, as text or as JSON; `show_log` those of a command."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from realizar.cli.terminal.printable import PrintableFormatter

LogFormat = Literal["text", "json"]
_LEVELS = (("warning: ", "warning"), ("realizar: ", "error"))


def log_to_stderr(level: str, form: LogFormat = "text") -> None:
    """Write log lines from `level` on, one of `logging`'s names in any letters, with the time of each.

    With `json`, what else the process writes to `sys.stderr` becomes JSON lines too. What can't be written is lost.
    """
    stderr = sys.stderr = _LosingStream(sys.stderr)
    lines = logging.StreamHandler(stderr)
    if form == "json":
        lines.setFormatter(_JsonFormatter())
        sys.stderr = _JsonLines(stderr)
    else:
        lines.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[lines])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def show_log(verbose: bool) -> None:
    """Show all of this package's log lines on stderr if `verbose`; otherwise warnings alone, as `lastResort` does."""
    if verbose and logging.lastResort is not None:
        logging.lastResort.setLevel(logging.DEBUG)
        logging.getLogger("realizar").setLevel(logging.DEBUG)  # numba's own log would drown the rest


class _LosingStream(io.TextIOBase):
    """A text stream that loses what its disk has no room for, or its pipe no reader."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()


class _JsonFormatter(logging.Formatter):
    """A record as one line of JSON, with the fields that its `fields` attribute has."""

    def format(self, record: logging.LogRecord) -> str:
        error = {"exception": self.formatException(record.exc_info)} if record.exc_info else {}
        fields: dict[str, Any] = getattr(record, "fields", {})
        return _line(record.created, record.levelname.lower(), record.getMessage(), {**fields, **error})


class _JsonLines(io.TextIOBase):
    """A text stream whose lines become JSON. Threads may write at once: each has a line of its own until its end."""

    def __init__(self, stream: _LosingStream) -> None:
        self._stream, self._own = stream, threading.local()

    def write(self, text: str) -> int:
        *lines, self._own.open = (getattr(self._own, "open", "") + text).split("\n")
        for line in lines:
            if line.strip():
                level = next((level for start, level in _LEVELS if line.startswith(start)), "info")
                self._stream.write(_line(datetime.now(UTC).timestamp(), level, line, {}) + "\n")
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()


def _line(time_s: float, level: str, message: str, fields: dict[str, Any]) -> str:
    time = datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps({"time": time, "level": level, "message": message, **fields}, default=str)
