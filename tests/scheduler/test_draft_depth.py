"""The number of drafts that a backend is asked for, on a clock of its own: what pays is found, and found again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from realizar.batch import StepRows
from realizar.scheduler.drafts import DraftDepth

ROWS = 64


class Load:
    """Rows of which each draft is right with a probability, of all or of each, and steps that take
    `seconds(rows, drafts of all)`.
    """

    def __init__(self, depth: DraftDepth, seconds: Callable[[int, int], float], right: float | Sequence[float]) -> None:
        self._depth, self._seconds, self.right = depth, seconds, right
        self._rng = np.random.default_rng(1)
        self._now_s, self._drafts = 0.0, np.zeros(ROWS, np.int32)
        self.depths: list[list[int]] = []  # of each step's rows

    def run(self, num_steps: int, num_rows: int = 1, chunk_every: int = 0) -> float:
        """Tokens a second of so many steps, of which some have prompts too."""
        tokens, began_s, rows, ones = 0, self._now_s, np.arange(num_rows), np.ones(num_rows, np.int32)
        step = StepRows.of_decodes(rows.astype(np.int64), rows, ones, ones)
        right = np.broadcast_to(np.asarray(self.right), num_rows)
        for index in range(num_steps):
            has_prompt = chunk_every > 0 and index % chunk_every == 0
            verified = replace(step, num_drafts=self._drafts[:num_rows])
            taken = np.array([self._taken(*each) for each in zip(verified.num_drafts.tolist(), right, strict=True)])
            self._drafts = np.zeros(ROWS, np.int32)
            if self._depth.pays(num_rows):
                self._drafts[:num_rows] = self._depth.of(rows, num_rows)
            self.depths.append(self._drafts[:num_rows].tolist())
            self._now_s += self._seconds(num_rows, int(self._drafts.sum())) + 5.0 * has_prompt
            self._depth.take_in(verified, taken, np.ones(num_rows, np.bool_), self._now_s, only_decodes=not has_prompt)
            tokens += int(taken.sum())
        return tokens / (self._now_s - began_s)

    def mean(self, num_steps: int, rows: slice = slice(None)) -> float:
        """The depth of some rows in the last steps."""
        return float(np.mean([each[rows] for each in self.depths[-num_steps:]]))

    def _taken(self, drafts: int, right: float) -> int:
        wrong = self._rng.random(drafts) >= right
        return 1 + (int(wrong.argmax()) if wrong.any() else drafts)


def seconds(num_rows: int, drafts: int) -> float:
    """A step of a model, a tenth of it for each draft of a row, and what verifying many rows adds."""
    return 1.0 + 0.1 * drafts / num_rows + 0.03 * drafts


def measured(most: int) -> DraftDepth:
    return DraftDepth(most, ROWS, measures=True)


def fixed(most: int, right: float | Sequence[float], num_rows: int = 1) -> float:
    """Tokens a second to be expected where each row has so many drafts: its next one counts if all before it do."""
    counted = np.broadcast_to(right, num_rows)[:, None] ** np.arange(most + 1)
    return float(counted.sum()) / seconds(num_rows, most * num_rows)


def test_as_many_as_there_may_be_without_measures() -> None:
    depth = DraftDepth(5, ROWS, measures=False)
    assert {*depth.of(np.arange(ROWS), 3)} == {5}
    assert not DraftDepth(0, ROWS, measures=False).pays(3)


@pytest.mark.parametrize(("right", "rows"), [(0.9, 1), (0.6, 1), (0.1, 1), (0.0, 1), (0.7, 8), (0.3, 40)])
def test_a_load_is_hardly_slower_than_with_the_best_depth(right: float, rows: int) -> None:
    load = Load(measured(3), seconds, right)
    load.run(200, rows)
    assert load.run(8000, rows) >= 0.98 * max(fixed(depth, right, rows) for depth in range(4))


def test_drafts_that_are_never_right_end() -> None:
    load = Load(measured(16), seconds, 0.0)
    load.run(2000)
    assert load.mean(1000) < 0.1


def test_a_row_whose_drafts_are_refused_has_nearly_none_and_its_neighbours_keep_theirs() -> None:
    """As many tokens a second, and more, than with any depth that all have, or none."""
    right = [0.0, 0.9, 0.0, 0.9, 0.0, 0.9, 0.5, 0.9]
    load = Load(measured(4), seconds, right)
    load.run(1000, 8)
    found = load.run(4000, 8)
    refused, kept, doubted = (load.mean(4000, rows) for rows in (slice(0, 5, 2), slice(1, 8, 2), slice(6, 7)))
    assert refused < 0.15
    assert kept > 3.5
    assert 0.2 < doubted < 1.5
    assert found >= 1.05 * max(fixed(depth, right, 8) for depth in range(5))


def test_a_row_that_is_right_again_drafts_again() -> None:
    load = Load(measured(3), seconds, [0.0, 0.9])
    load.run(1000, 2)
    load.right = [0.9, 0.0]
    load.run(200, 2)
    load.run(800, 2)
    assert load.mean(800, slice(0, 1)) > 2.5
    assert load.mean(800, slice(1, 2)) < 0.3


def test_another_sequence_in_a_row_begins_anew() -> None:
    depth = measured(3)
    load = Load(depth, seconds, [0.0, 0.9])
    load.run(1000, 2)
    before = depth.of(np.arange(2), 2)
    depth.begin(0)
    assert before.tolist() == [0, 3]
    assert depth.of(np.arange(2), 2).tolist() == [3, 3]


def test_what_pays_is_found_again_when_texts_change() -> None:
    load = Load(measured(3), seconds, 0.0)
    load.run(1000)
    assert load.mean(500) < 0.2
    load.right = 0.95
    load.run(8000)
    assert load.run(2000) >= 0.95 * fixed(3, 0.95)


def test_a_machine_that_gets_slower_is_no_reason_to_look_again() -> None:
    """Steps take twice as long in the end, as of a long context, and drafts are never right."""
    slower = iter(np.linspace(1.0, 2.0, 12_000))
    load = Load(measured(3), lambda rows, drafts: seconds(rows, drafts) * next(slower), 0.0)
    load.run(12_000)
    assert np.mean(np.array(load.depths[200:]) > 0) < 0.03


def test_numbers_of_rows_are_measured_apart_and_beside_prompts() -> None:
    load = Load(measured(3), seconds, 0.7)
    for _ in range(60):
        load.run(20, 1, chunk_every=5)
        load.run(20, 64, chunk_every=5)
    assert np.mean(load.depths[-40:-20]) >= 2
    assert np.mean(load.depths[-20:]) <= 1


def test_numbers_of_rows_nearest_to_ones_that_no_draft_pays_begin_without() -> None:
    """They are measured with drafts all the same, a run later; those near ones that draft begin with drafts."""
    depth = measured(3)
    load = Load(depth, seconds, right=0.0)
    assert depth.pays(20)
    load.run(200, num_rows=32)
    assert not depth.pays(32)
    assert not depth.pays(20)
    load.right = 0.9
    load.run(120, num_rows=2)
    assert not any(map(any, load.depths[200:216]))
    assert load.mean(40) > 2
    assert depth.pays(3)
