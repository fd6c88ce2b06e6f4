"""Processes of their own: their start, their limits and their ends. Standard library only."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def start_process(
    command: Sequence[str], *descriptors: int, output: int | None = subprocess.DEVNULL
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a program with one end of a pair of sockets, and return the other. Raises OSError.

    The descriptors of its end and of further open files that it gets are appended to the command. `output` is as
    `stdout` of a subprocess; a pipe gets what it writes as errors, too.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        passed = (theirs.fileno(), *descriptors)
        try:
            process = subprocess.Popen(
                [*command, *map(str, passed)],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output == subprocess.PIPE else None,
                start_new_session=True,  # keeps the terminal's signals away from it
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


def state_of(pid: int) -> str:
    """The letter of a process's state, such as `T` where a signal has stopped it; empty where no system says it."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return (status.rpartition(")")[2].split() or [""])[0]


def end_of(status: int) -> str:
    """How a process has ended, as words that follow its name, by the status that `subprocess` gives it."""
    return f"ended with status {status}" if status >= 0 else f"was killed by {signal_name(-status)}"


def signal_name(number: int) -> str:
    """Its name, or the number of one that has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def limit_process(memory_bytes: int) -> None:
    """Bound the memory, disable core files, and close the output, as a library's panic would quote a user's text."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # systems without /proc have no such limit either
        data_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[5])
        most = within(data_pages * resource.getpagesize() + memory_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1])
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def within(wanted: int, hard: int) -> int:
    """The largest allowed limit up to `wanted`; a hard limit of -1 is none."""
    return wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
