"""`log_to_stderr` sends the lines of a server's log to stderr."""

from __future__ import annotations

import logging
import sys

from realizar.cli.terminal.printable import PrintableFormatter


def log_to_stderr(level: str) -> None:
    """Write log lines from `level` on, one of `logging`'s names in any letters, with the time of each."""
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[lines])
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
