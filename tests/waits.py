"""How tests wait, and how they start processes and look for them meanwhile.

A busy machine may take minutes for what an idle one does at once. A process that ends in the middle of a question is as
good as ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HANG_S = 600.0
"""Seconds after which a wait is a hang. Nothing is measured by it: a wait ends as soon as its condition holds."""
_POLL_S, _LONGEST_POLL_S = 0.005, 0.05


def wait_until(condition: Callable[[], bool]) -> None:
    """Return when the condition holds. Between questions that take long it is idle for longer: a server has other work.

    Raises:
        AssertionError: it has not held for HANG_S.
    """
    until_s = time.monotonic() + HANG_S
    while True:
        asked_s = time.monotonic()
        if condition():
            return
        assert asked_s < until_s, "waited in vain"
        time.sleep(min(max(_POLL_S, 2 * (time.monotonic() - asked_s)), _LONGEST_POLL_S))


@contextmanager
def process(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process that is over, and whose pipes are closed, at the end of the block, whatever happens there."""
    with subprocess.Popen(command, **options) as started:
        try:
            yield started
        finally:
            started.kill()


def is_alive(pid: int) -> bool:
    """True if a process runs or is stopped; a zombie does not."""
    return _state(pid) not in ("Z", "")


def stop(pid: int) -> None:
    """Stop a process, and wait until it stands still or has ended."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _state(pid) in ("T", "Z", ""))


def _state(pid: int) -> str:
    """The letter of a process's state in /proc; empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:  # also of a process that ended between the opening of the file and its reading
        return ""


def child_pids(pid: int) -> list[int]:
    """Processes that the main thread of a process has started and that it has not waited for, zombies among them."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def child_commands(pid: int) -> dict[int, bytes]:
    """The commands of those of them that run, by their ids; words of a command end with a null byte."""
    commands: dict[int, bytes] = {}
    for child in child_pids(pid):
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if is_alive(child):
            commands[child] = command
    return commands
