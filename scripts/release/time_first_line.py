"""Seconds from the end of a model's download to the first character of its answer, and before, from an empty home.

    python scripts/release/time_first_line.py --runs 5 -- uvx --from . realizar run smollm2:135m "Why is the sky blue?"

The command has to fetch its model. Each run has a home of its own, so that there is no environment, bytecode or kernel
from the one before. Prints each run and the medians, with the seconds of processor of all that a run started.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import resource
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

_FETCHED = re.compile(rb"(\d+\.\d)/\1 [MG]B")


class Start(NamedTuple):
    """Seconds: to the model's last byte, from there to the first character, and of processors."""

    fetched_s: float
    answered_s: float
    processor_s: float


def time_start(command: list[str], home: str) -> Start:
    """SystemExit: the command ends without an answer, or fetches nothing."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "PYTHON"))}
    terminal, its_terminal = pty.openpty()  # the progress is shown on one alone
    before, begin_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=its_terminal,
        env={**environment, "HOME": home},
    )  # fmt: skip
    os.close(its_terminal)
    assert process.stdout is not None
    shown, fetched_s, first_s = b"", 0.0, 0.0
    with selectors.DefaultSelector() as selector:
        for each in (terminal, process.stdout.fileno()):
            selector.register(each, selectors.EVENT_READ)
        while not first_s:
            for key, _ in selector.select():
                read, now_s = _read(key.fd), time.perf_counter() - begin_s
                if key.fd == terminal:
                    shown += read
                    fetched_s = fetched_s or (now_s if _FETCHED.search(shown) else 0.0)
                    if not read:
                        selector.unregister(terminal)
                elif not read or not fetched_s:
                    sys.exit(f"no answer behind a download: {shown[-1000:].decode(errors='replace')}")
                else:
                    first_s = now_s
    process.communicate()
    os.close(terminal)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Start(fetched_s, first_s - fetched_s, used_s)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # a terminal whose programs have ended
        return b""


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a first answer from an empty home.")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("command", nargs="+", help="behind --")
    given = parser.parse_args()
    starts = []
    for _ in range(given.runs):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
            starts.append(time_start(given.command, home))
        _show("", starts[-1])
    _show("medians: ", Start(*map(statistics.median, zip(*starts, strict=True))))


def _show(label: str, start: Start) -> None:
    load = os.getloadavg()[0]
    print(
        f"{label}fetched after {start.fetched_s:.1f} s, the first character {start.answered_s:.2f} s after that,"
        f" {start.processor_s:.1f} s of processor; load {load:.1f}", flush=True,
    )  # fmt: skip


if __name__ == "__main__":
    main()
