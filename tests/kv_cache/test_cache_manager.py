"""Block tables and slots against a plain model of which positions a row must still hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from realizar.kv_cache.block_keys import BlockKeys
from realizar.kv_cache.block_pool import BlockCounts
from realizar.kv_cache.manager import KVCacheManager


def make_manager(
    windows: tuple[int | None, ...] = (None,), num_blocks: int = 10, block_size: int = 4, max_step_tokens: int = 8
) -> KVCacheManager:
    return KVCacheManager(
        windows,
        [num_blocks] * len(windows),
        block_size=block_size,
        num_rows=4,
        context_length=80,
        max_step_tokens=max_step_tokens,
    )


def slots(manager: KVCacheManager, row: int, positions: range) -> tuple[list[int], ...]:
    places = np.array(positions, np.int32)
    return tuple(group.tolist() for group in manager.slot_mapping(np.full(len(places), row, np.int32), places))


def test_slots_follow_the_block_table() -> None:
    manager = make_manager()
    manager.allocate(0, 0, 6)
    manager.allocate(1, 0, 1)
    manager.allocate(0, 6, 5)
    (table,) = manager.block_tables(np.array([0, 1], np.int32), 11)
    assert table.shape == (2, 3)
    assert table.dtype == np.int32
    assert slots(manager, 0, range(11))[0] == [int(table[0, at // 4]) * 4 + at % 4 for at in range(11)]
    assert len(set(table[0].tolist()) | {int(table[1, 0])}) == 4


def test_tables_are_copies() -> None:
    manager = make_manager()
    manager.allocate(0, 0, 4)
    (table,) = manager.block_tables(np.array([0], np.int32), 4)
    before = table.copy()
    manager.free(0)
    manager.allocate(1, 0, 4)
    manager.allocate(0, 0, 4)
    assert (table == before).all()


@given(
    window=st.integers(1, 20),
    block_size=st.integers(1, 7),
    chunks=st.lists(st.integers(1, 8), min_size=1, max_size=10),
)
def test_a_window_holds_what_is_seen_and_no_more_than_it_must(window: int, block_size: int, chunks: list[int]) -> None:
    """Every position that the last token or a later one sees keeps its slot; blocks that nobody sees are free."""
    manager = make_manager((window, None), num_blocks=80, block_size=block_size)
    slot_of: dict[int, int] = {}
    computed = 0
    for chunk in chunks:
        assert manager.allocate(2, computed, chunk) == chunk
        new = slots(manager, 2, range(computed, computed + chunk))[0]
        slot_of.update(zip(range(computed, computed + chunk), new, strict=True))
        seen = range(max(computed - window, 0), computed + chunk)
        assert slots(manager, 2, seen)[0] == [slot_of[position] for position in seen]
        held = {position // block_size for position in seen}
        windowed, full = manager.audit()
        assert windowed.used == len(held)
        assert full.used == -(-(computed + chunk) // block_size)
        computed += chunk
    manager.free(2)
    assert manager.audit() == (BlockCounts(free=80, used=0, total=80),) * 2


@given(
    windows=st.sampled_from([(None,), (5,), (None, 3), (6, 11)]),
    num_blocks=st.integers(2, 9),
    computed=st.integers(0, 12),
    wanted=st.integers(1, 30),
    other=st.integers(0, 12),
)
def test_allocate_takes_all_that_fits(
    windows: tuple[int | None, ...], num_blocks: int, computed: int, wanted: int, other: int
) -> None:
    """A row and another, token by token, then a chunk: it gets what the free blocks hold, by a count of positions."""
    manager = make_manager(windows, num_blocks=num_blocks)
    for row, tokens in ((0, computed), (1, other)):
        for start in range(tokens):
            if manager.allocate(row, start, 1) == 0:
                return
    counts = manager.audit()
    room = wanted
    for window, count in zip(windows, counts, strict=True):
        held = {position // 4 for position in range(computed)}
        if window is not None:  # the last allocation freed what the two tokens before this one did not see
            held = {position // 4 for position in range(max(computed - window - 1, 0), computed)}
        seen = {position // 4 for position in range(max(computed - (window or 1000), 0), computed)}
        free = count.free + len(held - seen)
        last = -(-computed // 4)
        room = min(room, (last + free) * 4 - computed)
    assert manager.allocate(0, computed, wanted) == max(room, 0)
    manager.audit()


@given(
    window=st.sampled_from([None, 1, 2, 5, 9]),
    num_blocks=st.integers(1, 8),
    block_size=st.integers(1, 5),
    num_tokens=st.integers(1, 60),
)
def test_max_tokens_is_exact(window: int | None, num_blocks: int, block_size: int, num_tokens: int) -> None:
    """A sequence of so many tokens goes through token by token if, and only if, `max_tokens` is no less."""
    manager = make_manager((window,), num_blocks=num_blocks, block_size=block_size)
    stuck = False
    for computed in range(num_tokens):
        if manager.allocate(0, computed, 1) == 0:
            stuck = True
            break
    assert (num_tokens > manager.max_tokens) is stuck


def test_admission_leaves_a_block_for_each_row_that_may_grow() -> None:
    manager = make_manager(num_blocks=6)
    manager.allocate(0, 0, 4)
    assert manager.can_allocate(16)
    assert not manager.can_allocate(17)
    manager.allocate(1, 0, 4)
    assert not manager.can_allocate(16)
    assert manager.can_allocate(8)


def test_a_row_at_its_full_window_needs_no_block_in_reserve() -> None:
    manager = make_manager((4,), num_blocks=4, max_step_tokens=1)
    for computed in range(6):  # tokens 2 to 5 are seen, in two blocks: all that such a window ever holds
        manager.allocate(0, computed, 1)
    assert manager.audit() == (BlockCounts(free=2, used=2, total=4),)
    assert manager.can_allocate(40)


def test_the_audit_sees_a_table_that_lost_a_block() -> None:
    manager = make_manager()
    manager.allocate(0, 0, 8)
    manager._groups[0].end[0] = 1
    with pytest.raises(RuntimeError, match="hold KV block 1 0 times, and its reference count is 1"):
        manager.audit()


def fill(manager: KVCacheManager, row: int, keys: BlockKeys, token_ids: NDArray[np.int32], chunk: int) -> None:
    """Compute a history in chunks, from nothing."""
    for start in range(0, len(token_ids), chunk):
        count = min(chunk, len(token_ids) - start)
        assert manager.allocate(row, start, count) == count
        manager.register(row, keys, token_ids, start + count)


@given(
    windows=st.sampled_from([(None,), (5,), (None, 6), (3, 9), (9, None)]),
    length=st.integers(1, 40),
    common=st.integers(0, 40),
    limit=st.integers(0, 40),
    chunk=st.integers(1, 8),
    lost=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9)), max_size=3),
)
def test_a_prefix_is_the_longest_that_leaves_nobody_without_what_it_sees(
    windows: tuple[int | None, ...], length: int, common: int, limit: int, chunk: int, lost: list[tuple[int, int]]
) -> None:
    """Against a search from the longest down, over the contents that each block is known to hold."""
    manager = make_manager(windows, num_blocks=12)
    history = np.array([7 * place % 11 for place in range(length)], np.int32)
    fill(manager, 0, BlockKeys(4, None), history, chunk)
    manager.free(0)
    names = BlockKeys(4, None).of(history)
    for group, index in lost:  # blocks that were given to others since
        pool = manager._groups[group % len(windows)].pool
        if index < len(names) and pool.find(names[index]) is not None:
            block = pool.find(names[index])
            del pool._cached[block], pool._blocks[pool._keys.pop(block)]
            pool._free.append(block)
    asked = np.concatenate((history[:common], np.full(9, 50, np.int32)))
    same = len(history[:common])
    wanted = 0
    for end in range(min(limit, same) // 4, -1, -1):
        seen = [range(max(4 * end - (window or 1000) + 1, 0) // 4, end) for window in windows]
        if all(
            manager._groups[group].pool.find(names[index]) is not None
            for group, blocks in enumerate(seen)
            for index in blocks
        ):
            wanted = 4 * end
            break
    prefix = manager.find_prefix(BlockKeys(4, None), asked, min(limit, len(asked)))
    assert prefix.num_tokens == wanted
    manager.adopt(1, prefix)
    assert manager.allocate(1, wanted, 2) == 2
    for group, window in enumerate(windows):
        first = max(wanted - (window or 1000) + 1, 0) // 4
        table = manager._groups[group].tables[1]
        for index in range(first, wanted // 4):
            assert table[index] == manager._groups[group].pool.find(names[index])
    manager.audit()
    manager.free(1)
    manager.audit()


def test_a_shared_block_that_leaves_a_window_makes_no_room() -> None:
    """Two rows share a beginning; the first moves on: what it leaves is still the other's."""
    manager = make_manager((4,), num_blocks=4, max_step_tokens=1)
    keys, history = BlockKeys(4, None), np.arange(1, 9, dtype=np.int32)
    fill(manager, 0, keys, history, 4)
    prefix = manager.find_prefix(keys, history, 7)
    assert prefix.num_tokens == 4
    manager.adopt(1, prefix)
    assert manager.allocate(1, 4, 1) == 1
    manager.allocate(2, 0, 4)
    (counts,) = manager.audit()
    assert counts == BlockCounts(free=0, used=4, total=4)
    assert manager.allocate(0, 8, 1) == 0  # its first block left the window and is row 1's
    manager.free(1)
    assert manager.allocate(0, 8, 1) == 1
    manager.audit()


def test_admission_counts_cached_blocks_as_room_and_shared_ones_as_there() -> None:
    manager = make_manager(num_blocks=6)
    keys, history = BlockKeys(4, None), np.arange(16, dtype=np.int32)
    fill(manager, 0, keys, history, 8)
    prefix = manager.find_prefix(keys, history, 15)
    assert prefix.num_tokens == 12
    assert manager.can_allocate(16, prefix)  # three blocks are there, one is new, and one in reserve
    assert not manager.can_allocate(24, prefix)
    assert not manager.can_allocate(16)
    manager.free(0)
    assert manager.can_allocate(24, prefix)
    assert manager.can_allocate(24)


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    manager = KVCacheManager(
        [None], [6], block_size=4, num_rows=2, context_length=24, max_step_tokens=8, prefix_cache=False
    )
    keys, history = BlockKeys(4, None), np.arange(16, dtype=np.int32)
    fill(manager, 0, keys, history, 8)
    assert manager.find_prefix(keys, history, 15).num_tokens == 0
    manager.free(0)
    assert manager.counts == (BlockCounts(free=6, used=0, total=6),)


def test_what_is_put_takes_the_place_of_others_alone() -> None:
    """Not that of blocks in use, nor of those of the history that it goes on."""
    manager = make_manager(num_blocks=6)
    own, others, more = ([bytes([first + place]) * 32 for place in range(3)] for first in (0, 10, 20))
    assert len(manager.put(0, own[:2], own)) == 2
    assert len(manager.put(0, others, others)) == 3
    manager.allocate(0, 0, 1)
    assert len(manager.put(0, more, own)) == 3
    assert [manager.found(0, key) is not None for key in (*own, *others, *more)] == [True] * 2 + [False] * 4 + [
        True
    ] * 3
    assert manager.put(0, [b"x" * 32], (*own, *more)) == []
    manager.free(0)
    manager.touch(0, more)
    assert len(manager.put(0, others, ())) == 3  # in the free block's place, and those of what was used before
    assert [manager.found(0, key) is not None for key in (*own[:2], *more)] == [False, False, True, True, True]
    assert manager.audit()[0].used == 0
