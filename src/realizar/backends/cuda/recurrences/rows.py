"""`RecurringRows`: the rows of a step as the kernels of recurrences take them, and how far each row's state is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from realizar.backends.base import ForwardInput
from realizar.backends.cuda.launch import StepKind
from realizar.backends.cuda.step_arrays import ROW_FIELDS, SCAN_TILE, StepSizes
from realizar.batch import StepRows

_FEW = 16  # tokens of a chunk that the recurrence takes one by one, at most

Views = dict[str, NDArray[np.int32]]


class _Rows(NamedTuple):
    """Rows of a step that have tokens in it: their numbers, first tokens, tokens, positions and uncertain tokens."""

    numbers: NDArray[np.intp]
    starts: NDArray[np.int32]
    counts: NDArray[np.int32]
    positions: NDArray[np.int32]
    uncertain: NDArray[np.int32]


class RecurringRows:
    """Knows after each submitted step how many tokens each row's state has seen; `ring` is the tokens of a ring.

    With `scans` chunks of more than a few tokens go through `scan_states`; else all go token by token, in one order.
    """

    def __init__(self, sizes: StepSizes, ring: int, most_uncertain: int, *, scans: bool) -> None:
        self._sizes, self._ring, self._most_uncertain, self._scans = sizes, ring, most_uncertain, scans
        self._seen = np.zeros(sizes.rows, np.int32)
        self._kept = np.zeros(sizes.rows, np.int32)  # tokens after those, whose inputs the ring has

    def fill(self, views: Views, step: ForwardInput, kind: StepKind) -> None:
        """Fill a step's arrays, and note what its rows' states will have seen.

        Raises RuntimeError: a row goes on from a position that neither its state nor its ring has, or more of its
        tokens are uncertain than it has, or than a ring keeps.
        """
        columns, num_rows = step.columns, num_recurring(kind, self._sizes)
        self._take_restored(step)
        rows = _rows_with_tokens(columns)
        numbers, _, counts, positions, uncertain = rows
        replayed = np.where(positions == 0, np.int32(0), positions - self._seen[numbers])
        wrong = (replayed < 0) | (replayed > self._kept[numbers])
        wrong |= (uncertain > counts) | (uncertain > self._most_uncertain)
        if wrong.any():
            self._refuse(rows, int(wrong.argmax()))
        certain = counts - uncertain
        scanned = (counts > _FEW) & (replayed == 0) & self._scans
        tiles = np.where(scanned, -(-counts // SCAN_TILE), 0)
        first_tiles = np.cumsum(tiles) - tiles
        table = views["recurring"].reshape(-1, ROW_FIELDS)
        size = len(numbers)
        fields = numbers, rows.starts, counts, replayed, certain, positions, scanned, first_tiles
        for place, field in enumerate(fields):
            table[:size, place] = field
        table[size:num_rows] = -1
        self._seen[numbers], self._kept[numbers] = positions + certain, uncertain
        self._fill_tokens(views, step, kind.tokens)
        tiled = scanned.nonzero()[0].tolist()
        _fill_tiles(views, tiled, counts, num_rows, num_tiles(kind, self._sizes))

    def assume(self, step: ForwardInput) -> None:
        """Let the rows of a step begin where it says, whatever their states are: steps are repeated to be measured."""
        self._seen[step.columns.numbers], self._kept[step.columns.numbers] = step.columns.num_computed_tokens, 0

    def _take_restored(self, step: ForwardInput) -> None:
        """Rows that begin from a snapshot have a state where the step begins them."""
        if begun := step.state_moves.begun:
            begins = np.isin(step.columns.numbers, begun)
            numbers = step.columns.numbers[begins]
            self._seen[numbers], self._kept[numbers] = step.columns.num_computed_tokens[begins], 0

    def _refuse(self, rows: _Rows, index: int) -> None:
        number = rows.numbers[index]
        raise RuntimeError(
            f"row {number} goes on at {rows.positions[index]} with {rows.counts[index]} tokens,"
            f" {rows.uncertain[index]} uncertain, and its state has {self._seen[number]} and {self._kept[number]}"
            " after it"
        )

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


def _rows_with_tokens(columns: StepRows) -> _Rows:
    """Rows without a token have no place in a grid, whose size the kind of a step gives."""
    counts = columns.num_tokens
    rows = _Rows(columns.numbers, columns.starts[:-1], counts, columns.num_computed_tokens, columns.num_uncertain)
    if columns.only_decodes or counts.all():
        return rows
    has = counts > 0
    return _Rows(rows.numbers[has], rows.starts[has], counts[has], rows.positions[has], rows.uncertain[has])


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


def num_recurring(kind: StepKind, sizes: StepSizes) -> int:
    """Rows of a step, at least: its decodes, and no more others than it has tiles of attention, or tokens."""
    return max(1, min(kind.decodes + kind.tiles, kind.tokens, sizes.rows))


def num_tiles(kind: StepKind, sizes: StepSizes) -> int:
    """Tiles of a step's chunks, at least: those that are full, and one more a row; 0 where no row can be scanned."""
    if not kind.tiles or kind.tokens <= _FEW:
        return 0
    return kind.tokens // SCAN_TILE + min(kind.tiles, sizes.rows)


def most_tiles(sizes: StepSizes) -> int:
    """Tiles of any step at most: a row that is scanned has more than a few tokens, and one tile in part."""
    return min(sizes.tokens // (_FEW + 1), (sizes.tokens + (SCAN_TILE - 1) * sizes.rows) // SCAN_TILE)
