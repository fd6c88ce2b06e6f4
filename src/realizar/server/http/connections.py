"""`Connections` counts open connections by peer, and chooses an idle one to close when all places are taken."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from realizar.server.http.clients import is_loopback, peer_of
from realizar.server.http.forwarded import TrustedProxies

_MAX_REFUSED = 32


class Closable(Protocol):
    """A connection that can be asked to close."""

    def give_way(self) -> None:
        """Close the connection, which has no open request."""


class Connections:
    """The table of open connections.

    When all places are taken, a new connection replaces the one that has been idle longest, so that idle connections
    keep nobody out. A peer that is neither this machine nor a trusted proxy may
    have half of the places.

    Args:
        most: the number of connections that may be open.
        proxies: addresses that speak for many clients.
    """

    def __init__(self, most: int, proxies: TrustedProxies) -> None:
        self._most, self._proxies = most, proxies
        self._peers: Counter[str] = Counter()
        self._open: dict[Closable, str] = {}
        self._idle: dict[Closable, None] = {}  # the longest idle first
        self._refused: set[Closable] = set()

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: Closable, address: str) -> bool:
        """Add a connection, which is idle at first; False if there is no place for it."""
        peer = peer_of(address)
        if self._peers[peer] >= max(1, self._most // 2) and not is_loopback(address) and not self._proxies.has(address):
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
        """True if a connection without a place may stay until it has its error answer; only a few may."""
        if len(self._refused) >= _MAX_REFUSED:
            return False
        self._refused.add(connection)
        return True

    def leave(self, connection: Closable) -> None:
        """Remove a closed connection; unknown ones are ignored."""
        peer = self._open.pop(connection, None)
        self._idle.pop(connection, None)
        self._refused.discard(connection)
        if peer is not None:
            self._peers[peer] -= 1
            if not self._peers[peer]:
                del self._peers[peer]

    def busy(self, connection: Closable) -> None:
        """Note that a request has arrived on a connection."""
        self._idle.pop(connection, None)

    def idle(self, connection: Closable) -> None:
        """Note that a connection has no open request any more."""
        if connection in self._open:
            self._idle.setdefault(connection)
