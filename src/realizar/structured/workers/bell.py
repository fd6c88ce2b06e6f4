"""`Bell` wakes all grammars' processes with one call of the system, and `Listener` waits for it in each of them.

A process that listens is told of every ring by an epoll of its own, edge-triggered, on an eventfd that nobody reads.
Where the system has neither, each process is sent a message.
"""

from __future__ import annotations

import os
import select

NO_BELL = -1
"""In place of the bell's descriptor where the system has none."""


class Bell:
    """The engine's side."""

    def __init__(self) -> None:
        can_ring = hasattr(os, "eventfd") and hasattr(select, "epoll")
        self.descriptor: int = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if can_ring else NO_BELL

    @property
    def rings(self) -> bool:
        """False if processes must be sent messages."""
        return self.descriptor != NO_BELL

    def ring(self) -> None:
        """Wake all processes that listen."""
        os.eventfd_write(self.descriptor, 1)

    def close(self) -> None:
        """Idempotent."""
        if self.rings:
            os.close(self.descriptor)
            self.descriptor = NO_BELL


class Listener:
    """A grammar's process waits for messages, and for the bell while it follows any row.

    Args:
        bell: the bell's descriptor, or NO_BELL.
        channel: descriptor of the channel to the engine's process.
    """

    def __init__(self, bell: int, channel: int) -> None:
        self._bell, self._channel, self._hears = bell, channel, False
        self._epoll = select.epoll() if bell != NO_BELL else None
        if self._epoll is not None:
            self._epoll.register(channel, select.EPOLLIN)

    def listen(self, on: bool) -> None:
        """Hear the bell from now on, or hear it no more."""
        if self._epoll is None or on == self._hears:
            return
        self._hears = on
        if on:
            self._epoll.register(self._bell, select.EPOLLIN | select.EPOLLET)
        else:
            self._epoll.unregister(self._bell)

    def wait(self) -> None:
        """Wait for a message or the bell."""
        if self._epoll is None:
            select.select([self._channel], [], [])
        else:
            self._epoll.poll()
