"""`StopRule`: which sampled token ends its row's output, for all rows of a step at once. numpy only.

The scheduler ends outputs by it. A backend that samples after drafts reads its results by it, since what follows the
end of an output was not sampled.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

FEW_STOP_IDS = 16  # of a row, that are compared for all rows at once; those of a row with more are compared apart
_NO_ID = -1  # in place of a stop id, which is at least 0
_LARGEST = 2**31 - 1  # of an int32


class StopRule:
    """The stop ids of open rows, and the number of tokens up to which they end nothing."""

    def __init__(self, num_rows: int) -> None:
        self._least_tokens = np.zeros(num_rows, np.int32)
        self._stop_ids = np.full((num_rows, FEW_STOP_IDS), _NO_ID, np.int32)
        self._many_stop_ids: dict[int, NDArray[np.int32]] = {}  # of rows that have more

    def open(self, row: int, stop_ids: Collection[int], least_tokens: int) -> None:
        """Start a row. `stop_ids` may be of any value, `least_tokens` more than any row ever has."""
        self.close(row)
        self._least_tokens[row] = min(least_tokens, _LARGEST)
        usable = [token_id for token_id in set(stop_ids) if 0 <= token_id <= _LARGEST]
        if len(usable) <= FEW_STOP_IDS:
            self._stop_ids[row, : len(usable)] = usable
        else:
            self._many_stop_ids[row] = np.array(usable, np.int32)

    def close(self, row: int) -> None:
        self._stop_ids[row] = _NO_ID
        self._many_stop_ids.pop(row, None)

    def stops(
        self, rows: NDArray[np.intp], token_ids: NDArray[np.int32], positions: NDArray[np.integer]
    ) -> NDArray[np.bool_]:
        """bool [rows, tokens], true where a token of int32 [rows, tokens] ends its row's output.

        `positions`, [rows, tokens], say how many tokens lie before each, counted as in `least_tokens`.
        """
        found: NDArray[np.bool_]
        stop_ids = self._stop_ids.take(rows, axis=0)
        if token_ids.shape[1] == 1:
            found = (stop_ids == token_ids).any(axis=1)[:, None]
        else:
            found = (stop_ids[:, None] == token_ids[:, :, None]).any(axis=2)
        for row, many in self._many_stop_ids.items():
            at = rows == row
            found[at] = np.isin(token_ids[at], many)
        return found & (positions >= self._least_tokens[rows][:, None])

    def kept(
        self, rows: NDArray[np.intp], sampled: NDArray[np.int32], positions: NDArray[np.integer]
    ) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """`up_to_end` by stop ids alone, and bool [rows], true where the last token that is kept ends the output."""
        stops = self.stops(rows, sampled, positions)
        counts = up_to_end(sampled, stops)
        return counts, stops[np.arange(len(rows)), counts - 1] & (counts > 0)


def up_to_end(sampled: NDArray[np.int32], ends: NDArray[np.bool_]) -> NDArray[np.intp]:
    """How many of its sampled tokens each row keeps, intp [rows]: up to the first that ends its output.

    Both are [rows, tokens]; `sampled` is negative after a row's last token, whatever follows it.
    """
    there = np.logical_and.accumulate(sampled >= 0, axis=1)
    found = there & ends
    counts: NDArray[np.intp] = np.where(found.any(axis=1), found.argmax(axis=1) + 1, np.count_nonzero(there, axis=1))
    return counts
