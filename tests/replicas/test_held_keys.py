"""What a replica holds, against a plain set of keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realizar.replicas import routing
from realizar.replicas.routing import HeldKeys, KeyChanges, KeyReport

KEYS = tuple(bytes([number]) * 16 for number in range(8))
_SOME = st.lists(st.sampled_from(KEYS), max_size=4).map(tuple)
_CHANGES = st.builds(KeyChanges, _SOME, _SOME)


def _usable(blocks: set[bytes], ends: set[bytes] | None) -> int:
    usable = 0
    for place, key in enumerate(KEYS, 1):
        if key not in blocks:
            break
        usable = place if ends is None or key in ends else usable
    return usable


@given(st.lists(st.tuples(_CHANGES, st.none() | _CHANGES), max_size=6))
def test_reports_change_what_a_set_would_hold(reports: list[tuple[KeyChanges, KeyChanges | None]]) -> None:
    held = HeldKeys(incarnation=3)
    blocks: set[bytes] = set()
    ends: set[bytes] | None = None
    for number, (of_blocks, of_ends) in enumerate(reports):
        assert held.take(KeyReport(3, number, of_blocks, of_ends))
        blocks = (blocks - set(of_blocks.removed)) | set(of_blocks.added)
        if of_ends is not None:
            ends = ((ends or set()) - set(of_ends.removed)) | set(of_ends.added)
        assert held.num_usable(KEYS, 1e9) == _usable(blocks, ends)
        assert len(held) == len(blocks)


def test_expected_keys_count_until_they_are_reported_or_their_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "EXPECTED_S", 10.0)
    held = HeldKeys()
    held.expect(KEYS[:4], 0.0)
    assert held.num_usable(KEYS, 5.0) == 4
    assert held.take(KeyReport(0, 0, KeyChanges(KEYS[:2])))
    assert len(held._expected) == 2
    assert held.num_usable(KEYS, 5.0) == 4
    assert held.num_usable(KEYS, 10.0) == 2
    assert held.take(KeyReport(0, 1, KeyChanges(removed=KEYS[1:2])))
    assert held.num_usable(KEYS, 10.0) == 1


def test_a_snapshot_bounds_what_is_held_and_not_what_is_expected() -> None:
    held = HeldKeys()
    held.expect(KEYS[:4], 0.0)
    assert held.num_usable(KEYS, 0.0) == 4
    assert held.take(KeyReport(0, 0, KeyChanges(KEYS[:4]), KeyChanges(KEYS[1:2])))
    assert held.num_usable(KEYS, 0.0) == 2


def test_another_generation_is_ignored_and_a_gap_forgets_all_until_a_complete_report() -> None:
    held = HeldKeys(incarnation=1)
    assert held.take(KeyReport(1, 0, KeyChanges(KEYS)))
    assert not held.take(KeyReport(0, 1, KeyChanges(removed=KEYS)))
    assert held.num_usable(KEYS, 0.0) == len(KEYS)
    assert not held.take(KeyReport(1, 2, KeyChanges(removed=KEYS[7:])))
    assert held.num_usable(KEYS, 0.0) == 0
    assert not held.take(KeyReport(1, 3, KeyChanges(KEYS)))
    assert held.take(KeyReport(1, 9, KeyChanges(KEYS[:3]), complete=True))
    assert held.take(KeyReport(1, 10, KeyChanges(KEYS[3:4])))
    assert held.num_usable(KEYS, 0.0) == 4


def test_the_oldest_keys_are_forgotten_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "MOST_KEYS", 3)
    held = HeldKeys()
    assert held.take(KeyReport(0, 0, KeyChanges(KEYS), KeyChanges(KEYS)))
    assert len(held) == 3
    assert held.num_usable(KEYS[5:], 0.0) == 3
    held.expect(KEYS[:5], 0.0)
    assert len(held._expected) == 3
