"""`RowAxes`: positions on several axes of a rope, of the rows of a backend whose requests bring some. numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from realizar.batch import OpenedRow, StepRows


class RowAxes:
    """Positions of the rows whose requests bring some (`Request.rope_positions`)."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[NDArray[np.int32], int]] = {}  # [axes, prompt tokens], and `shift`

    def open(self, opened: OpenedRow) -> None:
        if opened.rope_positions:
            given = np.frombuffer(opened.rope_positions, np.int32).reshape(3, -1)
            self._rows[opened.row] = given, int(given.max()) + 1 - given.shape[1]

    def close(self, row: int) -> None:
        self._rows.pop(row, None)

    def shift(self, row: int) -> int:
        """How far beyond their places the positions of a row's tokens after its prompt are, on every axis."""
        return self._rows[row][1] if row in self._rows else 0

    def positions(self, columns: StepRows, places: NDArray[np.int32]) -> NDArray[np.int32]:
        """Of a step's tokens with their places in the text: these, int32 [tokens], or [axes, tokens] with such rows."""
        own = [index for index, row in enumerate(columns.numbers.tolist()) if row in self._rows] if self._rows else []
        if not own:
            return places
        found = np.repeat(places[None], 3, axis=0)
        for index in own:
            given, shift = self._rows[int(columns.numbers[index])]
            tokens, count = slice(*columns.starts[index : index + 2]), given.shape[1]
            at = places[tokens]
            found[:, tokens] = np.where(at < count, given[:, np.minimum(at, count - 1)], at + shift)
        return found
