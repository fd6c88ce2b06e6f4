"""The rows of a step as the kernels of recurrences take them: places, replays, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from realizar.backends.base import ForwardInput
from realizar.backends.cuda.launch import StepKind
from realizar.backends.cuda.recurrences.rows import RecurringRows, most_tiles, num_recurring, num_tiles
from realizar.backends.cuda.shapes import chunk_kinds, mixed_kinds
from realizar.backends.cuda.step_arrays import StepSizes, recurrence_counts, tiles_of
from realizar.batch import StateMoves
from step_inputs import ScheduledRow, scheduled_row, step_input

SIZES = StepSizes(512, 8, 32, 8 + 512 // 16 + 1, 1, 16, 16, recurrences=True)
FIELDS = ("slot", "start", "count", "replay", "certain", "position", "scanned", "first_tile")


class Filled:
    """What a step's arrays hold after `fill`."""

    def __init__(self, *, scans: bool = True, most_uncertain: int = 4) -> None:
        self.rows = RecurringRows(SIZES, 8, most_uncertain, scans=scans)
        self.views = {name: np.full(count, 77, np.int32) for name, count in recurrence_counts(SIZES).items()}

    def step(self, *rows: ScheduledRow, moves: StateMoves | None = None) -> list[dict[str, int]]:
        """The table's rows, those of padding left out."""
        step = replace(forward(*rows), **({} if moves is None else {"state_moves": moves}))
        kind = shape_of(step)
        self.rows.fill(self.views, step, kind)
        table = self.views["recurring"].reshape(-1, 8)[: num_recurring(kind, SIZES)]
        return [dict(zip(FIELDS, row.tolist(), strict=False)) for row in table if row[0] >= 0]


def forward(*rows: ScheduledRow) -> ForwardInput:
    tokens = sum(row.num_tokens for row in rows)
    return step_input(rows, [np.zeros(tokens, np.int32)], [np.zeros((len(rows), 1), np.int32)])


def shape_of(step: ForwardInput) -> StepKind:
    """Without any padding: the least room that a step has."""
    decodes = int(np.count_nonzero(step.columns.num_tokens == 1))
    return StepKind(len(step.columns.token_ids), decodes, len(tiles_of(step, SIZES.tile_tokens)))


def test_drafts_and_held_rows() -> None:
    """Accepted tokens are replayed, refused ones are not, and a deferred row's token is computed again."""
    filled = Filled()
    filled.step(scheduled_row(2, [1] * 5), scheduled_row(5, [1] * 3))
    filled.step(scheduled_row(2, [1], 5, drafts=[2, 3]), scheduled_row(5, [1], 3, num_uncertain=1))
    found = filled.step(scheduled_row(2, [1], 7, drafts=[4]), scheduled_row(5, [1], 3, num_uncertain=1))
    assert [(row["slot"], row["replay"], row["certain"]) for row in found] == [(2, 1, 1), (5, 0, 0)]
    found = filled.step(scheduled_row(5, [1], 4), scheduled_row(2, [1] * 40, 8))
    assert [(row["slot"], row["replay"], row["scanned"]) for row in found] == [(5, 1, 0), (2, 0, 1)]


def test_rows_without_tokens_take_no_place() -> None:
    """A grid has a program for each row that computes something: none may lie behind those that do not."""
    filled = Filled()
    filled.step(scheduled_row(4, [1] * 6, num_uncertain=2))
    dead = [scheduled_row(row, []) for row in (0, 1, 2)]
    found = filled.step(*dead, scheduled_row(3, [1]), scheduled_row(4, [], 5), scheduled_row(5, [1] * 20))
    assert [(row["slot"], row["start"], row["count"]) for row in found] == [(3, 0, 1), (5, 1, 20)]
    assert filled.views["scanned"][0] == 1, "the second row of the table"
    (found_,) = filled.step(scheduled_row(4, [1], 5))
    assert found_["replay"] == 1, "a row without tokens is where it was"


@pytest.mark.parametrize(
    "row",
    [
        scheduled_row(1, [1], 3),  # before what its state has seen
        scheduled_row(1, [1], 8),  # beyond what its ring keeps
        scheduled_row(0, [1], 9),  # of a row that has no state
        scheduled_row(1, [1], 5, num_uncertain=2),
        scheduled_row(1, [1] * 7, 5, num_uncertain=5),
    ],
)
def test_what_no_state_can_go_on_from_is_refused(row: ScheduledRow) -> None:
    filled = Filled()
    filled.step(scheduled_row(1, [1] * 7, num_uncertain=2))
    with pytest.raises(RuntimeError, match=f"row {row.row} goes on at {row.num_computed_tokens} with"):
        filled.step(row)


def test_a_restored_row_begins_at_its_snapshot() -> None:
    filled = Filled()
    filled.step(scheduled_row(1, [1] * 7, num_uncertain=2))
    (found,) = filled.step(scheduled_row(1, [1] * 30, 64), moves=StateMoves(restored=((1, 0),)))
    assert (found["replay"], found["position"], found["scanned"]) == (0, 64, 1)


def test_steps_that_are_measured_again() -> None:
    """Each repetition begins where the step says, with nothing to replay."""
    filled = Filled()
    rows = scheduled_row(1, [1], 100), scheduled_row(2, [1] * 40, 200)
    for _ in range(3):
        filled.rows.assume(forward(*rows))
        found = filled.step(*rows)
        assert [(row["replay"], row["certain"], row["scanned"]) for row in found] == [(0, 1, 0), (0, 40, 1)]


def test_the_ring_keeps_the_last_tokens() -> None:
    filled = Filled()
    filled.step(scheduled_row(3, [1] * 20))
    slots = filled.views["ring_slots"][:20]
    assert (slots[:12] == -1).all()
    assert sorted(slots[12:].tolist()) == list(range(24, 32))
    assert slots[12] == 24 + 12 % 8


def random_counts(rng: np.random.Generator) -> NDArray[np.int64]:
    """Tokens of some rows, of all sizes, that make a full step or a smaller one."""
    counts = rng.choice([1, 1, 2, 15, 17, 63, 64, 65, 129, 200], rng.integers(1, SIZES.rows + 1))
    return counts[np.cumsum(counts) <= SIZES.tokens]


@pytest.mark.parametrize("seed", range(30))
def test_rows_and_tiles_have_room_in_every_shape(seed: int) -> None:
    """In the smallest shape, and in every one that holds the step: no array is too short, and no row is left out."""
    counts = random_counts(np.random.default_rng(seed))
    rows = [scheduled_row(row, [1] * int(count)) for row, count in enumerate(counts)]
    step = forward(*rows)
    own = shape_of(step)
    larger = [s for s in chunk_kinds(SIZES) if s.tokens >= own.tokens and s.decodes >= own.decodes and own.tiles]
    scanned = [int(count) for count in counts if count > 16]
    tiles = sum(-(-count // 64) for count in scanned)
    lengths = recurrence_counts(SIZES)
    for kind in (own, *(kind for kind in larger if kind.tiles >= own.tiles)):
        assert len(rows) <= num_recurring(kind, SIZES) <= SIZES.rows
        if kind.tiles:
            assert tiles <= num_tiles(kind, SIZES) <= lengths["scan_rows"]
        assert tiles <= most_tiles(SIZES)
        filled = Filled()
        filled.rows.fill(filled.views, step, kind)
        found = filled.views["scan_rows"][: num_tiles(kind, SIZES)]
        assert np.count_nonzero(found >= 0) == tiles
        assert np.count_nonzero(filled.views["scanned"][: num_recurring(kind, SIZES)] >= 0) == len(scanned)


def test_rows_know_their_first_tiles() -> None:
    filled = Filled()
    counts = 20, 1, 130, 64, 3, 17
    table = filled.step(*(scheduled_row(row, [1] * count) for row, count in enumerate(counts)))
    assert [row["first_tile"] for row in table if row["scanned"]] == [0, 1, 4, 5]
    for index, row in enumerate(table):
        if row["scanned"]:
            at = row["first_tile"]
            assert (filled.views["scan_rows"][at], filled.views["scan_firsts"][at]) == (index, 0)


def test_the_most_tiles_are_those_of_the_shortest_rows() -> None:
    shortest = replace(SIZES, rows=SIZES.tokens)
    assert most_tiles(shortest) == SIZES.tokens // 17
    assert most_tiles(replace(SIZES, rows=1)) == -(-SIZES.tokens // 64)


def test_shapes_that_are_warmed_fit() -> None:
    for kind in mixed_kinds(SIZES):
        assert num_recurring(kind, SIZES) <= SIZES.rows
        assert num_tiles(kind, SIZES) <= recurrence_counts(SIZES)["scan_rows"]
