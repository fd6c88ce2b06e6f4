"""`Connections`: how many are open, whose they are, and which of them gives way when all places are taken."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from realizar.server.http.clients import is_loopback, peer_of

_MAX_REFUSED = 32


class Closable(Protocol):
    """A connection, as far as it can be told to give way."""

    def give_way(self) -> None:
        """Close, as no request is open."""


class Connections:
    """Counts open connections.

    When all places are taken, the connection that has waited longest for a request gives way to a new one, so that idle
    connections keep nobody out. A peer other than this machine may have half of the places.

    Args:
        most: that may be open.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._peers: Counter[str] = Counter()
        self._open: dict[Closable, str] = {}
        self._idle: dict[Closable, None] = {}  # the longest idle first
        self._refused: set[Closable] = set()

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: Closable, address: str) -> bool:
        """Take in a connection, which is idle at first; False where there is no place for it."""
        peer = peer_of(address)
        if not is_loopback(address) and self._peers[peer] >= max(1, self._most // 2):
            return False
        if len(self._open) >= self._most:
            if not self._idle:
                return False
            longest = next(iter(self._idle))
            self.leave(longest)
            longest.give_way()
        self._open[connection] = peer
        self._peers[peer] += 1
        self._idle[connection] = None
        return True

    def may_be_refused(self, connection: Closable) -> bool:
        """Whether a connection that was not taken in may stay for the moment that being told so takes; few may."""
        if len(self._refused) >= _MAX_REFUSED:
            return False
        self._refused.add(connection)
        return True

    def leave(self, connection: Closable) -> None:
        """A connection is closed. One that was never taken in, or left before, passes."""
        peer = self._open.pop(connection, None)
        self._idle.pop(connection, None)
        self._refused.discard(connection)
        if peer is not None:
            self._peers[peer] -= 1
            if not self._peers[peer]:
                del self._peers[peer]

    def busy(self, connection: Closable) -> None:
        """A request has come."""
        self._idle.pop(connection, None)

    def idle(self, connection: Closable) -> None:
        """The answer has gone, and no request is open."""
        if connection in self._open:
            self._idle.setdefault(connection)
