"""`Places`: the places that answers take while they run or wait, shared by the clients who want them."""

from __future__ import annotations

from collections import Counter

from realizar.request import Client


class Places:
    """Counts the places that each client has.

    A client may take whatever is free, so a lone one may have everything. Where too little is free it still gets its
    fair share: the part of all places that its weight is of the weights of those who have some, and one at least. So
    no number of requests of one client keeps another one out, and nobody who is in has to leave. With N clients of one
    weight, places are taken at most 1 + 1/2 + ... + 1/N times over, as long as there is a place for each; every client
    beyond has one more.
    """

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        self._weights: dict[str, int] = {}
        self.num_taken = 0

    def has_room(self, client: Client, count: int, num_places: int) -> bool:
        if self.num_taken + count <= num_places:
            return True
        weights = self._weights | {client.name: client.weight}
        share = num_places * client.weight // sum(weights.values())
        return self._held[client.name] + count <= max(share, 1)

    def take(self, client: Client, count: int = 1) -> None:
        """Count places as a client's; whoever takes them has asked before whether there is room."""
        self._held[client.name] += count
        self._weights[client.name] = client.weight
        self.num_taken += count

    def give(self, client: Client, count: int = 1) -> None:
        self._held[client.name] -= count
        self.num_taken -= count
        if not self._held[client.name]:
            del self._held[client.name], self._weights[client.name]
