"""`DeltaSplitter` takes a step's deltas apart by the processes whose requests they are of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from realizar.delta_shares import named_numbers, share_of
from realizar.step_deltas import StepDeltas

_Owner = TypeVar("_Owner")


class DeltaSplitter(Generic[_Owner]):
    """Knows the owner of every choice of which something came.

    Args:
        owner_of: the owner of a request by its id; None if it is not open.
    """

    def __init__(self, owner_of: Callable[[str], _Owner | None]) -> None:
        self._owner_of = owner_of
        self._owners: dict[int, _Owner] = {}  # by the engine's number of the choice
        self._numbers: dict[str, list[int]] = {}  # by request id

    def __len__(self) -> int:
        return len(self._owners)

    def split(self, deltas: StepDeltas) -> list[tuple[_Owner, StepDeltas]]:
        """Each owner's share. Deltas of requests that are not open are left out."""
        for start in deltas.starts:
            owner = self._owner_of(start.request_id)
            if owner is not None:
                self._owners[start.number] = owner
                self._numbers.setdefault(start.request_id, []).append(start.number)
        shares: dict[_Owner, set[int]] = {}
        numbers = named_numbers(deltas)
        for number in numbers:
            owner = self._owners.get(number)
            if owner is not None:
                shares.setdefault(owner, set()).add(number)
        if [len(mine) for mine in shares.values()] == [len(numbers)]:  # all is one owner's
            return [(owner, deltas) for owner in shares]
        return [(owner, share_of(deltas, mine)) for owner, mine in shares.items()]

    def forget(self, request_id: str) -> None:
        """Forget a request, of which nothing is wanted any more."""
        for number in self._numbers.pop(request_id, ()):
            self._owners.pop(number, None)

    def clear(self) -> None:
        """Forget every request, since their engine is gone; another one gives numbers anew."""
        self._owners.clear()
        self._numbers.clear()
