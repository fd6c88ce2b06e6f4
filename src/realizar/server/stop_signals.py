"""`StopSignals`: what SIGTERM, SIGINT and SIGHUP ask of a server."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Self


class StopSignals:
    """SIGTERM and SIGINT as futures: the first signal drains the server, the second stops it at once.

    Args:
        hang_up: called at SIGHUP; None leaves that signal alone. The SIGHUP of a terminal that is closed is no wish of
            anyone: it drains the server, as it would end any program, and means nothing to one that `nohup` started.
    """

    def __init__(self, hang_up: Callable[[], None] | None) -> None:
        self._loop, self._hang_up = asyncio.get_running_loop(), hang_up
        self.first: asyncio.Future[int] = self._loop.create_future()
        self.second: asyncio.Future[int] = self._loop.create_future()
        self._had_terminal = _has_terminal()
        self._outlives_terminal = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._note, int(number))
        if self._hang_up is not None:
            self._loop.add_signal_handler(signal.SIGHUP, self._take_hang_up, self._hang_up)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)
        if self._hang_up is not None:
            self._loop.remove_signal_handler(signal.SIGHUP)

    def _take_hang_up(self, hang_up: Callable[[], None]) -> None:
        if not self._had_terminal or _has_terminal():
            hang_up()
            return
        self._had_terminal = False
        if not self._outlives_terminal:
            self._note(int(signal.SIGHUP))

    def _note(self, number: int) -> None:
        waiting = self.second if self.first.done() else self.first
        if not waiting.done():
            waiting.set_result(number)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
