"""`Turns`: the order in which clients' sequences start, in turn and by weight."""

from __future__ import annotations

from collections import Counter

from realizar.request import Client

_FEW = 64  # clients that are remembered in any case


class Turns:
    """Gives each sequence that begins to wait its turn; the smallest starts first.

    These are the start tags of fair queueing. A client's turns follow each other at a distance of 1 / weight, and the
    first one of a client who waited for nothing is now. Time passes by a round while every client who waits gets its
    weight of starts. So clients who wait start in turn, however many sequences of one wait already, and a lone client's
    sequences start in the order of their arrival.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._next: dict[str, float] = {}  # a client's turn after those that it has taken
        self._used: dict[str, float] = {}  # after as many as have started
        self._waiting: Counter[str] = Counter()
        self._weights: dict[str, int] = {}  # of those who wait
        self._most_known = _FEW

    def __len__(self) -> int:
        """Turns that were taken and are not used."""
        return self._waiting.total()

    def take(self, client: Client) -> float:
        """A turn for another sequence that waits."""
        name = client.name
        if len(self._next) > self._most_known:
            self._forget()
        following = self._next.get(name, self._now)
        # Behind as many as wait: those who left don't count, or whoever leaves and comes back would never start.
        behind = self._unused(name) + self._waiting[name] / client.weight
        turn = max(self._now, min(following, max(behind, following - 1 / client.weight)))
        self._next[name] = turn + 1 / client.weight
        self._waiting[name] += 1
        self._weights[name] = client.weight
        return turn

    def start(self, client: Client, turn: float) -> None:
        """A sequence starts that had this turn."""
        used = min(turn, self._unused(client.name)) + 1 / client.weight
        self._used[client.name] = max(self._used.get(client.name, 0.0), used)
        self._now += 1 / sum(self._weights.values())
        self._leave(client.name)

    def give_up(self, client: Client) -> None:
        """A sequence ended while it waited. A client who waits for nothing more gets the turns that it did not use."""
        self._leave(client.name)
        if client.name not in self._waiting:
            self._next[client.name] = self._used.get(client.name, self._now)

    def _unused(self, name: str) -> float:
        """The first turn that a client could have if it waited for nothing."""
        return max(self._used.get(name, self._now), self._now)

    def _leave(self, name: str) -> None:
        self._waiting[name] -= 1
        if not self._waiting[name]:
            del self._waiting[name], self._weights[name]

    def _forget(self) -> None:
        """Forget clients who have had no more than the others: their next turn is now in any case."""
        self._next = {name: turn for name, turn in self._next.items() if turn > self._now}
        self._used = {name: turn for name, turn in self._used.items() if turn > self._now}
        self._most_known = 2 * len(self._next) + _FEW
