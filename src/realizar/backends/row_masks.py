"""`RowMasks`: the masks of a step's rows as they lie in memory, for a backend that sends all at once. numpy only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


class RowMasks(Mapping[int, NDArray[np.uint32]]):
    """Masks of rows, by their number: uint32 [words], with drafts [drafts + 1, words]. Most lie in one table.

    Attributes:
        numbers: intp [rows]. places: intp [rows], the line of each row's first mask in the table.
        table: uint32 [lines, words]; other lines change at any time.
        drafted: those of rows with drafts.
    """

    def __init__(
        self, numbers: NDArray[np.intp], places: NDArray[np.intp], table: NDArray[np.uint32],
        drafted: Mapping[int, NDArray[np.uint32]],
    ) -> None:  # fmt: skip
        self.numbers, self.places, self.table, self.drafted = numbers, places, table, drafted

    @cached_property
    def _places(self) -> dict[int, int]:
        return dict(zip(self.numbers.tolist(), self.places.tolist(), strict=True))

    def __getitem__(self, number: int) -> NDArray[np.uint32]:
        place = self._places[number]
        found: NDArray[np.uint32] | None = self.drafted.get(number)
        return self.table[place] if found is None else found

    def __contains__(self, number: object) -> bool:
        return number in self._places

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self.numbers)
