"""Where snapshots of a prompt's state are taken: at ends of blocks, few enough, and where another prompt may part."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realizar.kv_cache.manager import Prefix
from realizar.scheduler.state_copies import MOST_OF_A_REQUEST, SnapshotPositions


def positions(
    num_tokens: int,
    marks: tuple[int, ...] = (),
    *,
    cached: int = 0,
    matched: int = 0,
    num_snapshots: int = 64,
    is_shared: bool = False,
    step_tokens: int | None = None,
) -> tuple[int, ...]:
    """With blocks of 16, a context of 8,192 and steps of 512 tokens: gaps of 64 and an interval of 512."""
    chooser = SnapshotPositions(num_snapshots, 16, 8192, 512)
    prefix = Prefix(cached, (), None, max(cached, matched))
    return chooser.of_prompt(num_tokens, marks, prefix, is_shared=is_shared, step_tokens=step_tokens)


def test_a_prompt_of_several_choices_has_a_place_near_its_end() -> None:
    assert positions(100, is_shared=True) == (96,)
    assert positions(97, is_shared=True) == (96,)
    assert positions(96, is_shared=True) == (80,)
    assert positions(16, is_shared=True) == ()


def test_a_prompt_without_messages_has_places_once_it_is_seen_again() -> None:
    assert positions(500) == ()
    assert positions(500, matched=496) == (496,)
    assert positions(500, cached=496) == ()
    assert positions(1200) == (512, 1024)


def test_the_last_place_is_before_the_generation_prompt() -> None:
    assert positions(100, (50, 80)) == (48, 80)
    assert positions(400, (50, 80)) == (48, 384)  # a text follows that no mark ends
    assert positions(100, (50, 100)) == (48, 96)


def test_messages_that_are_short_share_a_place() -> None:
    assert positions(400, (20, 40, 60, 80, 200, 220, 395)) == (16, 80, 208, 384)


def test_the_end_of_what_two_prompts_share_is_a_place() -> None:
    assert positions(400, (20, 395), matched=176) == (16, 176, 384)
    assert positions(400, (20, 395), cached=16, matched=384) == (384,)


def test_long_messages_have_places_within() -> None:
    assert positions(1700, (30, 1690)) == (16, 512, 1024, 1536, 1680)


@pytest.mark.parametrize(
    ("step_tokens", "num_snapshots", "interval"),
    [
        (None, 1000, 4096),
        (9000, 1000, 4096),  # a step has no more
        (4095, 1000, 2048),
        (2500, 1000, 2048),
        (2048, 1000, 2048),
        (2047, 1000, 1024),
        (100, 1000, 1024),  # memory bounds it: a sixteenth of the context
        (2500, 8, 8192),  # or a half, as a request may take two of eight
        (100, 20, 3280),  # a fifth, in full blocks
    ],
)
def test_places_within_messages_follow_speed_and_memory(
    step_tokens: int | None, num_snapshots: int, interval: int
) -> None:
    chooser = SnapshotPositions(num_snapshots, 16, 16_384, 4096)
    found = chooser.of_prompt(16_000, (), Prefix(0, (), None, 0), step_tokens=step_tokens)
    assert found == tuple(range(interval, 16_000, interval))


def test_what_is_cached_has_no_place() -> None:
    assert positions(400, (50, 200, 395), cached=192) == (384,)
    assert positions(400, (50, 200, 395), cached=384) == ()


@pytest.mark.parametrize("num_snapshots", [1, 4, 9, 64, 1000])
def test_a_long_prompt_leaves_the_snapshots_of_others(num_snapshots: int) -> None:
    found = positions(8000, tuple(range(1, 8000)), num_snapshots=num_snapshots)
    assert 1 <= len(found) <= min(MOST_OF_A_REQUEST, -(-num_snapshots // 4))
    assert found[-1] == 7984
    assert all(later - earlier >= 64 for earlier, later in itertools.pairwise(found[1:]))


def test_there_are_none_without_memory() -> None:
    assert positions(8000, (100, 200), num_snapshots=0) == ()


@given(
    num_tokens=st.integers(1, 5000),
    marks=st.lists(st.integers(-3, 6000), max_size=60),
    cached=st.integers(0, 300),
    matched=st.integers(0, 300),
    num_snapshots=st.integers(0, 80),
)
def test_places_are_ends_of_blocks_that_are_still_to_be_computed(
    num_tokens: int, marks: list[int], cached: int, matched: int, num_snapshots: int
) -> None:
    start = min(cached * 16, (num_tokens - 1) // 16 * 16)
    end = min(max(matched * 16, start), (num_tokens - 1) // 16 * 16)
    found = positions(num_tokens, tuple(marks), cached=start, matched=end, num_snapshots=num_snapshots)
    assert sorted(set(found)) == list(found)
    assert all(place % 16 == 0 and start < place < num_tokens for place in found)
    assert len(found) <= -(-num_snapshots // 4)
