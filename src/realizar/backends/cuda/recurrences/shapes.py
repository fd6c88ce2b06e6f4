"""Padded numbers of rows and tiles of recurrences, by the shape of a step alone, as grids and graphs need them."""

from __future__ import annotations

from realizar.backends.cuda.step_arrays import SCAN_TILE, StepShape, StepSizes


def num_recurring(shape: StepShape, sizes: StepSizes) -> int:
    """Rows of a step, at least: its decodes, and no more others than it has tiles of attention."""
    return max(1, min(shape.decodes + shape.tiles, sizes.rows))


def num_tiles(shape: StepShape, sizes: StepSizes) -> int:
    """Tiles of a step's chunks, at least: those that are full, and one more a row."""
    return shape.tokens // SCAN_TILE + min(shape.tiles, sizes.rows)
