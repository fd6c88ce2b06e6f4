"""Processes that end with their parent. Standard library only."""

from __future__ import annotations

import ctypes
import faulthandler
import signal
import sys

_PR_SET_PDEATHSIG = 1


def leave_signals_to_parent() -> None:
    """Ignore what a terminal or a service manager sends to the whole group, and end with the parent.

    Linux kills this process when the thread that started it ends, in case this process can't read its socket. That
    thread runs the parent's event loop, so nobody reads what this process sends without it.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    end_with_parent(signal.SIGKILL)


def end_with_parent(number: signal.Signals) -> None:
    """Have Linux send this process a signal when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
