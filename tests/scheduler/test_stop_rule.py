"""The rule by which outputs end, held to a loop over single tokens."""

from __future__ import annotations

import numpy as np

from realizar.stop_rule import FEW_STOP_IDS, StopRule


def test_kept_tokens_are_those_of_a_loop() -> None:
    """Few and many stop ids, late and early ones, results with codes below -1 and what lies behind them."""
    random = np.random.default_rng(7)
    rule, num_rows = StopRule(8), 8
    stops = [set(random.integers(0, 30, count).tolist()) for count in (0, 1, 2, 4, 60, 60, 3, 1)]
    assert max(map(len, stops)) > FEW_STOP_IDS
    least = random.integers(0, 6, num_rows)
    for row in range(num_rows):
        rule.open(row, {*stops[row], -1, 2**40}, int(least[row]))
    for _ in range(200):
        rows = random.permutation(num_rows)[:5]
        sampled = random.integers(-3, 30, (5, 4)).astype(np.int32)
        before = random.integers(0, 6, (5, 1))
        counts, ended = rule.kept(rows, sampled, before + np.arange(4))
        for index, row in enumerate(rows.tolist()):
            kept, end = _kept(sampled[index].tolist(), stops[row], int(least[row]) - int(before[index, 0]))
            assert (counts[index], ended[index]) == (kept, end)


def _kept(token_ids: list[int], stop_ids: set[int], least: int) -> tuple[int, bool]:
    for place, token_id in enumerate(token_ids):
        if token_id < 0:
            return place, False
        if place >= least and token_id in stop_ids:
            return place + 1, True
    return len(token_ids), False
