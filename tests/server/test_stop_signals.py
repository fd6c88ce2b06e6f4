"""`StopSignals` in a process of its own, which has a terminal or none."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from waits import HANG_S, process

_WAITING = """
import asyncio, os, signal, sys
from realizar.server.run import StopSignals

async def wait():
    changed = asyncio.Queue()
    with StopSignals(lambda: changed.put_nowait("restart")) as signals:
        signals.first.add_done_callback(lambda first: changed.put_nowait(f"end {first.result()}"))
        print("waiting", flush=True)
        print(await changed.get(), flush=True)

if len(sys.argv) > 1:
    os.open(sys.argv[1], os.O_RDWR)  # the first terminal that the leader of a session opens becomes its own
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[2:] else signal.SIG_DFL)  # whatever started the tests
asyncio.run(wait())
"""


@contextmanager
def waiting(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = (sys.executable, "-c", _WAITING, *arguments)
    with process(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "waiting\n"
        yield started


@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGHUP, "restart"), (signal.SIGTERM, f"end {signal.SIGTERM}"), (signal.SIGINT, f"end {signal.SIGINT}")],
)
def test_signals_without_a_terminal(number: signal.Signals, said: str) -> None:
    with waiting() as server:
        server.send_signal(number)
        assert server.communicate(timeout=HANG_S)[0] == f"{said}\n"


def test_a_hang_up_beside_a_terminal_restarts() -> None:
    own, other = pty.openpty()
    with waiting(os.ttyname(other)) as server:
        server.send_signal(signal.SIGHUP)
        assert server.communicate(timeout=HANG_S)[0] == "restart\n"
    os.close(own)
    os.close(other)


def test_a_terminal_that_is_closed_ends_the_server() -> None:
    own, other = pty.openpty()
    with waiting(os.ttyname(other)) as server:
        os.close(other)
        os.close(own)
        assert server.communicate(timeout=HANG_S)[0] == f"end {signal.SIGHUP}\n"


def test_a_server_that_outlives_its_terminal_restarts_at_the_next_hang_up() -> None:
    own, other = pty.openpty()
    with waiting(os.ttyname(other), "nohup") as server:
        os.close(other)
        os.close(own)
        with pytest.raises(subprocess.TimeoutExpired):
            server.communicate(timeout=1)
        server.send_signal(signal.SIGHUP)
        assert server.communicate(timeout=HANG_S)[0] == "restart\n"
