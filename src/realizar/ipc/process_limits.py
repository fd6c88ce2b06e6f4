"""Processes that work for strangers: their start and their limits. Standard library only."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def start_process(command: Sequence[str], *descriptors: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a program with one end of a pair of sockets, and return the other. Raises OSError.

    The descriptors of its end and of further open files that it gets are appended to the command.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        passed = (theirs.fileno(), *descriptors)
        try:
            process = subprocess.Popen(
                [*command, *map(str, passed)],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # keeps the terminal's signals away from it
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


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
