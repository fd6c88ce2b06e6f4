"""`OpenTable`: open requests by id, and by the numbers that an engine gives their choices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from realizar.engine.delta_shares import named_numbers, share_of
from realizar.step_deltas import ChoiceStart, StepDeltas

_Entry = TypeVar("_Entry")
_Owner = TypeVar("_Owner")


class OpenTable(dict[str, _Entry]):
    """What somebody knows of each open request. Numbers are known once their choice has started."""

    def __init__(self) -> None:
        super().__init__()
        self._starts: dict[int, ChoiceStart] = {}
        self._numbers: dict[str, list[int]] = {}  # by request id

    def note_starts(self, starts: Iterable[ChoiceStart]) -> None:
        """Note the numbers of choices; those of requests that are not open are passed over."""
        for start in starts:
            if start.request_id in self:
                self._starts[start.number] = start
                self._numbers.setdefault(start.request_id, []).append(start.number)

    def start_of(self, number: int) -> ChoiceStart | None:
        return self._starts.get(number)

    def numbers_of(self, request_id: str) -> tuple[int, ...]:
        return tuple(self._numbers.get(request_id, ()))

    def forget(self, request_id: str) -> _Entry | None:
        """Take out a request, which has ended; an unknown one passes."""
        for number in self._numbers.pop(request_id, ()):
            del self._starts[number]
        return self.pop(request_id, None)

    def forget_numbers(self) -> None:
        """Forget all numbers, since their engine is gone; another one gives numbers anew."""
        self._starts.clear()
        self._numbers.clear()

    def split(self, deltas: StepDeltas, owner_of: Callable[[_Entry], _Owner]) -> list[tuple[_Owner, StepDeltas]]:
        """Each owner's share of a step. Deltas of requests that are not open are left out."""
        self.note_starts(deltas.starts)
        shares: dict[_Owner, set[int]] = {}
        numbers = named_numbers(deltas)
        for number in numbers:
            start = self._starts.get(number)
            if start is not None:
                shares.setdefault(owner_of(self[start.request_id]), set()).add(number)
        if [len(mine) for mine in shares.values()] == [len(numbers)]:  # all is one owner's
            return [(owner, deltas) for owner in shares]
        return [(owner, share_of(deltas, mine)) for owner, mine in shares.items()]
