"""`DeltaSplitter` takes a step's deltas apart by the processes whose requests they are of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from realizar.logprob_columns import LogprobColumns
from realizar.step_deltas import StepDeltas, StepLogprobs

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
        get = self._owners.get
        named = list(map(get, deltas.number_list()))
        for columns in (*deltas.logprobs, *deltas.prompt_logprobs):
            named += map(get, columns.number_list())
        for listed in (deltas.starts, deltas.snapshots, deltas.ends, deltas.failures):
            named += [get(part.number) for part in listed]
        owners = list(dict.fromkeys(named))
        if len(owners) == 1 and owners[0] is not None:
            return [(owners[0], deltas)]
        return [(owner, self._share(deltas, owner)) for owner in owners if owner is not None]

    def forget(self, request_id: str) -> None:
        """Forget a request, of which nothing is wanted any more."""
        for number in self._numbers.pop(request_id, ()):
            self._owners.pop(number, None)

    def clear(self) -> None:
        """Forget every request, since their engine is gone; another one gives numbers anew."""
        self._owners.clear()
        self._numbers.clear()

    def _share(self, deltas: StepDeltas, owner: _Owner) -> StepDeltas:
        numbers = np.frombuffer(deltas.numbers, np.int64)
        mine = self._are_of(numbers, owner)
        counts, tokens = np.frombuffer(deltas.counts, np.int32), mine
        if len(counts):
            tokens, counts = np.repeat(mine, counts), counts[mine]
        get = self._owners.get
        return StepDeltas(
            produced_s=deltas.produced_s,
            numbers=numbers[mine].tobytes(),
            counts=counts.tobytes(),
            token_ids=np.frombuffer(deltas.token_ids, np.int32)[tokens].tobytes(),
            starts=tuple([part for part in deltas.starts if get(part.number) == owner]),
            snapshots=tuple([part for part in deltas.snapshots if get(part.number) == owner]),
            logprobs=self._shares_of_logprobs(deltas.logprobs, owner),
            prompt_logprobs=self._shares_of_logprobs(deltas.prompt_logprobs, owner),
            ends=tuple([part for part in deltas.ends if get(part.number) == owner]),
            failures=tuple([part for part in deltas.failures if get(part.number) == owner]),
        )

    def _shares_of_logprobs(self, parts: Sequence[StepLogprobs], owner: _Owner) -> tuple[StepLogprobs, ...]:
        shares = [self._share_of_logprobs(part, owner) for part in parts]
        return tuple([share for share in shares if share.numbers])

    def _share_of_logprobs(self, part: StepLogprobs, owner: _Owner) -> StepLogprobs:
        numbers, entries = np.frombuffer(part.numbers, np.int64), part.entries
        mine, width = self._are_of(numbers, owner), entries.width
        return StepLogprobs(
            numbers[mine].tobytes(),
            LogprobColumns(
                width,
                np.frombuffer(entries.ids, np.int32).reshape(-1, width)[mine].tobytes(),
                np.frombuffer(entries.values, np.float64).reshape(-1, width)[mine].tobytes(),
                np.frombuffer(entries.ranks, np.int32)[mine].tobytes(),
            ),
        )

    def _are_of(self, numbers: NDArray[np.int64], owner: _Owner) -> NDArray[np.bool_]:
        get = self._owners.get
        return np.array([get(number) == owner for number in numbers.tolist()], np.bool_)
