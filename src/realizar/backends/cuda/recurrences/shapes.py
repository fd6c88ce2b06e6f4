"""Padded numbers of rows and tiles of recurrences, by the kind of a step alone, as grids and graphs need them."""

from __future__ import annotations

from realizar.backends.cuda.launch import StepKind
from realizar.backends.cuda.step_arrays import SCAN_TILE, StepSizes


def num_recurring(kind: StepKind, sizes: StepSizes) -> int:
    """Rows of a step, at least: its decodes, and no more others than it has tiles of attention."""
    return max(1, min(kind.decodes + kind.tiles, sizes.rows))


def num_tiles(kind: StepKind, sizes: StepSizes) -> int:
    """Tiles of a step's chunks, at least: those that are full, and one more a row."""
    return kind.tokens // SCAN_TILE + min(kind.tiles, sizes.rows)
