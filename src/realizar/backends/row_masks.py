"""`RowMasks`: the masks of a step's rows as they lie in memory, for a backend that sends all at once. numpy only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


class RowMasks(Mapping[int, NDArray[np.uint32]]):
    """Masks of rows, by their number: uint32 [words], with drafts [drafts + 1, words]. Most lie in one table.

    Attributes:
        numbers: intp [rows]. indices: intp [rows], of each row's first mask in the table.
        table: uint32 [masks, words]; others of its masks change at any time.
        drafted: those of rows with drafts.
        versions: int64 [kept], of the table's last masks. A mask that is named here is the same as long as its version
            is, which is above 0.
    """

    def __init__(
        self, numbers: NDArray[np.intp], indices: NDArray[np.intp], table: NDArray[np.uint32],
        drafted: Mapping[int, NDArray[np.uint32]], versions: NDArray[np.int64] | None = None,
    ) -> None:  # fmt: skip
        self.numbers, self.indices, self.table, self.drafted = numbers, indices, table, drafted
        self.versions = np.zeros(0, np.int64) if versions is None else versions

    @cached_property
    def _index_of(self) -> dict[int, int]:
        return dict(zip(self.numbers.tolist(), self.indices.tolist(), strict=True))

    def __getitem__(self, number: int) -> NDArray[np.uint32]:
        index = self._index_of[number]
        found: NDArray[np.uint32] | None = self.drafted.get(number)
        return self.table[index] if found is None else found

    def __contains__(self, number: object) -> bool:
        return number in self._index_of

    def __iter__(self) -> Iterator[int]:
        return iter(self._index_of)

    def __len__(self) -> int:
        return len(self.numbers)
