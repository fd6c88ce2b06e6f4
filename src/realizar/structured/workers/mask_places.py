"""`MaskPlaces` hands out runs of masks in the shared memory."""

from __future__ import annotations

from collections import defaultdict


class MaskPlaces:
    """Runs of places, numbered from 0. A run that is given back serves the next one of its length.

    Attributes:
        num_places: number of places that were ever handed out.
    """

    def __init__(self) -> None:
        self.num_places = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # first places of runs, by their length

    def take(self, count: int) -> int:
        """The first place of a run of `count`."""
        if self._free[count]:
            return self._free[count].pop()
        first = self.num_places
        self.num_places += count
        return first

    def give_back(self, first: int, count: int) -> None:
        """A run of `count` is free again; nobody writes to it any more."""
        self._free[count].append(first)
