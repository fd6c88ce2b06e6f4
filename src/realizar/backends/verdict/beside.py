"""A process that compares a GPU with the CPU while this one loads its model: half of a first start otherwise.

It leaves its verdicts where `kept.py` finds them. No torch here, so that it can be begun before this process has it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from realizar.errors import HubError
from realizar.hub.folders import user_cache

_COMMAND = (sys.executable, "-m", "realizar.backends.verdict.comparing_process")
_begun: list[subprocess.Popen[bytes]] = []  # one that imports, or none
_asked: list[subprocess.Popen[bytes]] = []  # one that compares for a load, or has


def was_compared() -> bool:
    """True if verdicts on any card are kept: a start is no first one then."""
    try:
        return any((user_cache() / "verdicts").glob("*.json"))
    except (OSError, HubError):
        return False


@contextmanager
def begun(*, wanted: bool) -> Iterator[None]:
    """A block in which such a process imports what it needs, if `wanted`. None outlives it, asked or not."""
    if wanted:
        with suppress(OSError):  # the load compares by itself
            _begun.append(_start())
    try:
        yield
    finally:
        _end(_begun)
        _end(_asked)


def compare(index: int, names: Sequence[str]) -> Callable[[], None]:
    """Have the GPU of a number compared by small models, by name, for which there is no verdict; returns what waits.

    Nothing is said where that fails: a verdict is missing then. What compares for an earlier load, which failed, ends.
    """
    _end(_asked)
    try:
        process = _begun.pop() if _begun else _start()
    except OSError:
        return lambda: None
    _asked.append(process)
    assert process.stdin is not None
    with suppress(OSError), process.stdin:  # it has ended
        process.stdin.write("\n".join((str(index), *names)).encode())

    def wait() -> None:
        process.wait()

    return wait


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    while processes:
        with processes.pop() as process:
            process.kill()
