"""`Placement`: which replica has which open request, and what of it has come."""

from __future__ import annotations

from collections.abc import Iterable

from realizar.replicas.prompt_keys import prompt_keys
from realizar.replicas.replica import PlacedRequest, Replica
from realizar.replicas.routing import PrefixRouter
from realizar.request import Request
from realizar.step_deltas import StepDeltas


class Placement:
    """Sends each request to a replica by the router's choice, and follows it to its end.

    Args:
        replicas: all of them.

    Attributes:
        router: chooses; without a prefix cache by load alone.
    """

    def __init__(self, replicas: Iterable[Replica]) -> None:
        self._replicas = tuple(replicas)
        self._by_name = {replica.name: replica for replica in self._replicas}
        self._open: dict[str, PlacedRequest] = {}
        self._numbered: dict[int, tuple[PlacedRequest, int]] = {}  # choices of which something came, by number
        self._block_tokens = 0
        self.router = PrefixRouter(1)

    def of(self, request_id: str) -> PlacedRequest | None:
        """An open request."""
        return self._open.get(request_id)

    def set_block_tokens(self, block_tokens: int) -> None:
        """Note the size of the engines' blocks, which is the same for all."""
        if block_tokens != self._block_tokens:
            self._block_tokens = block_tokens
            self.router = PrefixRouter(block_tokens)

    def place(self, request: Request) -> PlacedRequest | None:
        """Choose the replica of a new request; None if none works."""
        keys = prompt_keys(request, self._block_tokens)
        chosen = self._choose(keys, request.num_prompt_tokens)
        if chosen is None:
            return None
        replica, pending = chosen
        placed = PlacedRequest(request, keys, replica, pending, set(range(request.sampling.n)))
        self._open[request.request_id] = replica.requests[request.request_id] = placed
        return placed

    def move(self, placed: PlacedRequest) -> bool:
        """Choose another replica for a request whose own one is gone; False if none works."""
        chosen = self._choose(placed.keys, placed.request.num_prompt_tokens)
        if chosen is None:
            return False
        placed.replica, placed.pending_tokens = chosen
        placed.num_moves += 1
        placed.replica.requests[placed.request.request_id] = placed
        return True

    def forget(self, request_id: str) -> None:
        """Forget a request, which has ended; an unknown one passes."""
        placed = self._open.pop(request_id, None)
        if placed is not None:
            placed.replica.requests.pop(request_id, None)
            for number in placed.numbers:
                self._numbered.pop(number, None)

    def note_end(self, request_id: str, choice: int | None) -> None:
        """Note that a choice has ended or is not wanted any more, or the whole request."""
        placed = self._open.get(request_id)
        if placed is None:
            return
        if choice is not None:
            placed.open_choices.discard(choice)
        if choice is None or not placed.open_choices:
            self.forget(request_id)

    def note_deltas(self, deltas: StepDeltas) -> None:
        """Follow the requests of a step, whose numbers are unique over all replicas."""
        for start in deltas.starts:
            placed = self._open.get(start.request_id)
            if placed is not None:
                placed.has_begun, placed.pending_tokens = True, 0
                placed.numbers.append(start.number)
                self._numbered[start.number] = placed, start.choice
        for end in deltas.ends:
            if end.number in self._numbered:
                placed, choice = self._numbered[end.number]
                self.note_end(placed.request.request_id, choice)
        for failure in deltas.failures:
            if failure.number in self._numbered:
                self.forget(self._numbered[failure.number][0].request.request_id)

    def clear(self) -> None:
        """Forget all requests."""
        for request_id in list(self._open):
            self.forget(request_id)

    def _choose(self, keys: tuple[bytes, ...], num_tokens: int) -> tuple[Replica, int] | None:
        """A replica, and the tokens that it has to compute; one that drains only where no other works."""
        usable = [each for each in self._replicas if each.state == "ready"]
        usable = usable or [each for each in self._replicas if each.is_alive]
        route = self.router.choose(keys, num_tokens, {each.name: each.load for each in usable})
        if route is None:
            return None
        self.router.placed(route.replica, keys)
        return self._by_name[route.replica], num_tokens - route.num_cached_tokens
