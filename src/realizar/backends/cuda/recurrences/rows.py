"""`RecurringRows`: the rows of a step as the kernels of recurrences take them, and how far each row's state is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from realizar.backends.base import ForwardInput
from realizar.backends.cuda.recurrences.shapes import num_recurring, num_tiles
from realizar.backends.cuda.step_arrays import ROW_FIELDS, SCAN_TILE, StepShape, StepSizes

_FEW = 16  # tokens of a chunk that the recurrence takes one by one, at most

Views = dict[str, NDArray[np.int32]]


class RecurringRows:
    """Knows after each submitted step how many tokens each row's state has seen.

    Args:
        sizes: of the largest step. ring: tokens of a ring.
        scans: chunks of more than a few tokens go through `scan_states`; else all go token by token, in one order.
    """

    def __init__(self, sizes: StepSizes, ring: int, *, scans: bool) -> None:
        self._sizes, self._ring, self._scans = sizes, ring, scans
        self._seen = np.zeros(sizes.rows, np.int32)

    def fill(self, views: Views, step: ForwardInput, shape: StepShape) -> None:
        """Fill a step's arrays, and note what its rows' states will have seen."""
        columns, num_rows = step.columns, num_recurring(shape, self._sizes)
        numbers, positions, counts = columns.numbers, columns.num_computed_tokens, columns.num_tokens
        restored = [row for row, _ in step.state_moves.restored]
        self._seen[restored] = -1
        seen = self._seen[numbers]
        seen = np.where(seen < 0, positions, np.where(positions == 0, np.int32(0), seen))
        certain = counts - columns.num_uncertain
        scanned = (counts > _FEW) & (positions == seen) & self._scans
        table = views["recurring"].reshape(-1, ROW_FIELDS)
        size = len(numbers)
        fields = numbers, columns.starts[:-1], counts, positions - seen, certain, positions, scanned
        for place, field in enumerate(fields):
            table[:size, place] = field
        table[size:num_rows] = -1
        self._seen[numbers] = positions + certain
        self._fill_tokens(views, step, shape.tokens)
        rows = scanned.nonzero()[0].tolist()
        _fill_tiles(views, rows, counts, num_rows, num_tiles(shape, self._sizes) if shape.tiles else 0)

    def _fill_tokens(self, views: Views, step: ForwardInput, num_tokens: int) -> None:
        """Fill in each token's row, its place among the row's, and where a ring keeps it, of those that it keeps."""
        columns, tokens = step.columns, len(step.positions)
        rows, offsets, left = columns.numbers, np.zeros(tokens, np.int32), np.ones(tokens, np.int32)
        if not columns.only_decodes:
            counts = columns.num_tokens
            rows = np.repeat(rows, counts)
            offsets = np.arange(tokens, dtype=np.int32) - np.repeat(columns.starts[:-1], counts)
            left = np.repeat(counts, counts) - offsets
        slots = np.where(left <= self._ring, rows * self._ring + step.positions % self._ring, -1)
        for name, values, nothing in (
            ("token_slots", rows, -1),
            ("token_offsets", offsets, 0),
            ("ring_slots", slots, -1),
        ):
            views[name][:tokens] = values
            views[name][tokens:num_tokens] = nothing


def _fill_tiles(
    views: Views, rows: Sequence[int], counts: NDArray[np.int32], num_rows: int, num_tiles: int
) -> None:  # fmt: skip
    """Fill in the rows that are scanned, and their tiles; both numbers are padded."""
    tiles = [(row, first) for row in rows for first in range(0, int(counts[row]), SCAN_TILE)]
    for name, values, padded in (
        ("scanned", rows, num_rows),
        ("scan_rows", [row for row, _ in tiles], num_tiles),
        ("scan_firsts", [first for _, first in tiles], num_tiles),
    ):
        views[name][: len(values)] = values
        views[name][len(values) : padded] = -1
