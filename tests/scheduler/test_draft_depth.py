"""The number of drafts that a backend is asked for, on a clock of its own: what pays is found, and found again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from realizar.scheduler.drafts import DraftDepth


class Load:
    """Rows of which each draft is right with a probability, and steps that take `seconds(rows, depth)`."""

    def __init__(self, depth: DraftDepth, seconds: Callable[[int, int], float], right: float) -> None:
        self._depth, self._seconds, self.right = depth, seconds, right
        self._rng = np.random.default_rng(1)
        self._now_s, self._drafts = 0.0, 0
        self.depths: list[int] = []

    def run(self, num_steps: int, num_rows: int = 1, chunk_every: int = 0) -> float:
        """Tokens a second of so many steps, of which some have prompts too."""
        tokens, began_s = 0, self._now_s
        for index in range(num_steps):
            has_prompt = chunk_every > 0 and index % chunk_every == 0
            taken = [self._taken(self._drafts) for _ in range(num_rows)]
            self._drafts = self._depth.of(num_rows)
            self.depths.append(self._drafts)
            self._now_s += self._seconds(num_rows, self._drafts) + 5.0 * has_prompt
            self._depth.take_in(num_rows, sum(taken), self._now_s, only_decodes=not has_prompt)
            tokens += sum(taken)
        return tokens / (self._now_s - began_s)

    def _taken(self, drafts: int) -> int:
        wrong = self._rng.random(drafts) >= self.right
        return 1 + (int(wrong.argmax()) if wrong.any() else drafts)


def seconds(num_rows: int, depth: int) -> float:
    """A step of a model, a tenth of it for each draft, and what verifying many rows adds."""
    return 1.0 + 0.1 * depth + 0.03 * num_rows * depth


def fixed(most: int, right: float, num_rows: int = 1) -> float:
    return Load(DraftDepth(most, measures=False), seconds, right).run(4000, num_rows)


def test_as_many_as_there_may_be_without_measures() -> None:
    assert {DraftDepth(5, measures=False).of(rows) for rows in range(100)} == {5}
    assert DraftDepth(0, measures=False).of(3) == 0


@pytest.mark.parametrize(("right", "rows"), [(0.9, 1), (0.6, 1), (0.1, 1), (0.0, 1), (0.7, 8), (0.3, 40)])
def test_a_load_is_hardly_slower_than_with_the_best_depth(right: float, rows: int) -> None:
    load = Load(DraftDepth(3, measures=True), seconds, right)
    load.run(200, rows)
    assert load.run(8000, rows) >= 0.98 * max(fixed(depth, right, rows) for depth in range(4))


def test_drafts_that_are_never_right_end() -> None:
    load = Load(DraftDepth(16, measures=True), seconds, 0.0)
    load.run(2000)
    assert np.mean(load.depths[-1000:]) < 0.1


def test_what_pays_is_found_again_when_texts_change() -> None:
    load = Load(DraftDepth(3, measures=True), seconds, 0.0)
    load.run(1000)
    assert np.mean(load.depths[-500:]) < 0.2
    load.right = 0.95
    load.run(8000)
    assert load.run(2000) >= 0.95 * fixed(3, 0.95)


def test_a_machine_that_gets_slower_is_no_reason_to_look_again() -> None:
    """Steps take twice as long in the end, as of a long context, and drafts are never right."""
    slower = iter(np.linspace(1.0, 2.0, 12_000))
    load = Load(DraftDepth(3, measures=True), lambda rows, depth: seconds(rows, depth) * next(slower), 0.0)
    load.run(12_000)
    assert np.mean(np.array(load.depths[200:]) > 0) < 0.03


def test_numbers_of_rows_are_measured_apart_and_beside_prompts() -> None:
    load = Load(DraftDepth(3, measures=True), seconds, 0.7)
    for _ in range(60):
        load.run(20, 1, chunk_every=5)
        load.run(20, 64, chunk_every=5)
    assert np.mean([load.depths[-40:-20]]) >= 2
    assert np.mean([load.depths[-20:]]) <= 1
