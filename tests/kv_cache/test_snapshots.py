"""Snapshots are found by their blocks, dropped with them or for others, and never written while a step reads them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from realizar.batch import NO_MOVES
from realizar.kv_cache.block_keys import BlockKeys
from realizar.kv_cache.manager import GroupBlocks, KVCacheManager
from realizar.kv_cache.snapshot_tiers import SnapshotPool
from realizar.outputs import SnapshotUse

TOKENS = np.arange(100, dtype=np.int32)


def everything(_key: bytes) -> bool:
    return True


def take(pool: SnapshotPool, key: bytes, client: str = "") -> int:
    """A snapshot of a step that is done."""
    snapshot, _ = pool.take(key, client)
    assert snapshot is not None
    pool.free([snapshot])
    return snapshot


def test_the_least_recently_used_snapshot_is_dropped() -> None:
    pool = SnapshotPool(2, {})
    first, second = take(pool, b"a"), take(pool, b"b")
    pool.use(b"a")
    pool.free([first])
    assert take(pool, b"c") == second
    assert [pool.find(key) for key in (b"a", b"b", b"c")] == [first, None, second]
    assert (pool.num_blocks, {*pool.keys}) == (2, {b"a", b"c"})


def test_a_snapshot_that_a_step_names_is_not_given_up() -> None:
    pool = SnapshotPool(2, {})
    first, second = take(pool, b"a"), take(pool, b"b")
    pool.use(b"a")
    assert take(pool, b"c") == second
    pool.use(b"c")
    assert pool.take(b"d") == (None, None)
    pool.free([first])
    assert pool.take(b"d") == (first, b"a")


def test_the_number_of_a_dropped_snapshot_waits_for_its_steps() -> None:
    pool = SnapshotPool(1, {})
    snapshot, _ = pool.take(b"a")
    assert snapshot == 0
    pool.drop(b"a")
    assert pool.find(b"a") is None
    assert pool.take(b"b") == (None, None)
    pool.audit()
    pool.free([snapshot])
    pool.audit()
    assert pool.take(b"b") == (0, None)


def test_there_is_one_snapshot_of_a_key() -> None:
    pool = SnapshotPool(3, {})
    take(pool, b"a")
    assert pool.take(b"a") == (None, None)
    assert len(pool.keys) == 1


def test_a_client_with_more_than_half_gives_up_its_own() -> None:
    """Although others' are older; half or less is given up by age."""
    pool = SnapshotPool(6, {})
    for number in range(2):
        take(pool, b"o%d" % number, f"other {number}")
    for number in range(4):
        take(pool, b"g%d" % number, "greedy")
    given_up = []
    for key, client in ((b"o2", "other 0"), (b"g4", "greedy"), (b"o3", "other 1")):
        snapshot, lost = pool.take(key, client)
        assert snapshot is not None
        pool.free([snapshot])
        given_up.append(lost)
    assert given_up == [b"g0", b"g1", b"o0"]
    pool.audit()


def test_one_client_alone_has_all() -> None:
    pool = SnapshotPool(3, {})
    for number in range(5):
        take(pool, bytes([number]), "alone")
    assert {*pool.keys} == {bytes([2]), bytes([3]), bytes([4])}


def test_a_greedy_client_whose_snapshots_are_named_takes_from_others() -> None:
    pool = SnapshotPool(2, {})
    take(pool, b"a", "other")
    assert pool.take(b"b", "greedy") == (1, None)
    assert pool.take(b"c", "greedy") == (0, b"a")


def test_without_memory_nothing_is_taken() -> None:
    pool = SnapshotPool(0, {})
    assert pool.take(b"a") == (None, None)
    pool.audit()


@pytest.mark.parametrize("fault", ["lost", "twice", "steps"])
def test_the_audit_finds(fault: str) -> None:
    pool = SnapshotPool(3, {})
    take(pool, b"a")
    if fault == "lost":
        pool._free.pop()
    elif fault == "twice":
        pool._free.append(0)
    elif fault == "steps":
        pool._ref_counts[2] = 1
    with pytest.raises(RuntimeError, match="snapshot"):
        pool.audit()


class Pool(RuleBasedStateMachine):
    """A pool beside what each snapshot must hold, with steps that end in the order in which they began."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SnapshotPool(4, {})
        self.held: dict[int, int] = {}  # what the memory of each snapshot holds
        self.steps: list[list[int]] = []
        self.now: list[int] = []

    @rule(number=st.integers(0, 9), client=st.sampled_from(["", "a", "b"]))
    def take(self, number: int, client: str) -> None:
        snapshot, _ = self.pool.take(bytes([number]), client)
        if snapshot is not None:
            assert not any(snapshot in step for step in [*self.steps, self.now])
            self.held[snapshot] = number
            self.now.append(snapshot)

    @rule(number=st.integers(0, 9))
    def restore(self, number: int) -> None:
        snapshot = self.pool.find(bytes([number]))
        if snapshot is not None and snapshot not in self.now:
            assert self.held[snapshot] == number
            assert self.pool.use(bytes([number])) == snapshot
            self.now.append(snapshot)

    @rule(number=st.integers(0, 9))
    def drop(self, number: int) -> None:
        self.pool.drop(bytes([number]))
        assert self.pool.find(bytes([number])) is None

    @rule()
    def submit(self) -> None:
        self.steps.append(self.now)
        self.now = []

    @precondition(lambda self: self.steps)
    @rule()
    def finish(self) -> None:
        self.pool.free(self.steps.pop(0))

    @invariant()
    def adds_up(self) -> None:
        self.pool.audit()


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)


def manager(
    windows: tuple[int | None, ...] = (None,), num_blocks: int = 20, num_snapshots: int = 4, **options: int
) -> KVCacheManager:
    return KVCacheManager(
        windows, [num_blocks] * len(windows), block_size=4, num_rows=3, context_length=64, max_step_tokens=16,
        has_state=True, num_snapshots=num_snapshots, **options,
    )  # fmt: skip


def compute(cache: KVCacheManager, keys: BlockKeys, num_tokens: int, places: tuple[int, ...], row: int = 0) -> None:
    """A row computes tokens, and snapshots are taken at places; then it ends."""
    done = 0
    for end in sorted({*places, num_tokens}):
        assert cache.allocate(row, done, end - done) >= end - done
        cache.register(row, keys, TOKENS[:end], end)
        if end in places:
            cache.take_snapshot(row, keys, TOKENS[:end], end)
            moves = cache.snapshots.take_moves()
            assert len(moves.taken) == 1
            cache.snapshots.finished(moves)
        done = end
        cache.audit()
    cache.free(row)


@pytest.mark.parametrize("windows", [(None,), (None, 6)], ids=str)
def test_a_prefix_ends_at_a_snapshot(windows: tuple[int | None, ...]) -> None:
    cache, keys = manager(windows), BlockKeys(4, None)
    compute(cache, keys, 30, (8, 20))
    for tokens, wanted in ((30, 20), (20, 20), (19, 8), (8, 8), (7, 0)):
        prefix = cache.find_prefix(BlockKeys(4, None), TOKENS[:40], tokens)
        assert prefix.num_tokens == wanted
        assert (prefix.snapshot is None) == (wanted == 0)
        assert prefix.num_matched_tokens == tokens // 4 * 4
    assert cache.find_prefix(BlockKeys(4, "salt"), TOKENS, 30).num_tokens == 0


def test_without_snapshots_nothing_is_found() -> None:
    cache = manager(num_snapshots=0)
    assert not cache.prefix_cache
    keys = BlockKeys(4, None)
    compute(cache, keys, 30, ())
    assert cache.find_prefix(keys, TOKENS, 30).num_tokens == 0


def test_a_snapshot_goes_with_the_block_that_it_follows() -> None:
    cache, keys = manager(num_blocks=8), BlockKeys(4, None)
    compute(cache, keys, 28, (8, 20))
    cache.allocate(1, 0, 16)  # four of the blocks: the last of the chain are given up first
    cache.audit()
    assert cache.snapshots.counts.dropped == 1
    assert cache.snapshots.take_uses() == {0: SnapshotUse(taken=2), 1: SnapshotUse(dropped=1)}
    assert cache.snapshots.take_uses() == {}
    assert cache.find_prefix(keys, TOKENS, 28).num_tokens == 8
    cache.free(1)
    cache.forget()
    cache.audit()
    assert cache.find_prefix(keys, TOKENS, 28).num_matched_tokens == 0
    assert cache.snapshots.counts.kept == 0


def test_snapshots_dropped_for_others_count_for_the_row_that_takes_them() -> None:
    cache, other = manager(num_blocks=30, num_snapshots=2), BlockKeys(4, "other")
    compute(cache, BlockKeys(4, None), 28, (8, 20))
    compute(cache, other, 12, (4, 8), row=2)
    assert cache.snapshots.take_uses() == {0: SnapshotUse(taken=2), 2: SnapshotUse(taken=2, dropped=2)}


def test_what_rests_on_a_forgotten_cache_is_not_found_later() -> None:
    """A row that is open then registers nothing more until it starts again."""
    cache, keys = manager(), BlockKeys(4, None)
    cache.allocate(0, 0, 8)
    cache.register(0, keys, TOKENS[:8], 8)
    cache.forget()
    assert not cache.lets_find(0)
    cache.allocate(0, 8, 12)
    rows = np.array([0], np.intp)
    assert not cache.have_new_blocks(rows, np.array([20], np.int32), np.array([20], np.int32)).any()
    cache.register(0, keys, TOKENS[:20], 20)
    cache.take_snapshot(0, keys, TOKENS[:20], 20)
    assert cache.snapshots.take_moves() == NO_MOVES
    cache.audit()
    cache.free(0)
    assert cache.find_prefix(keys, TOKENS, 28).num_matched_tokens == 0
    cache.adopt(0, cache.find_prefix(keys, TOKENS, 28))
    assert cache.lets_find(0)
    compute(cache, keys, 28, (20,))
    assert cache.find_prefix(keys, TOKENS, 28).num_tokens == 20


def test_blocks_after_the_last_snapshot_go_first() -> None:
    """A row's answer, which nothing can start after, gives way before what an earlier row left."""
    cache, first, second = manager(num_blocks=16), BlockKeys(4, None), BlockKeys(4, "other")
    compute(cache, first, 20, (20,))
    compute(cache, second, 40, (8,))
    cache.allocate(1, 0, 36)  # one block is free, and eight are of no use
    cache.audit()
    assert cache.find_prefix(first, TOKENS, 20).num_tokens == 20
    assert cache.find_prefix(second, TOKENS, 40).num_tokens == 8
    assert cache.snapshots.counts.dropped == 0


def test_a_snapshot_keeps_the_block_that_its_row_computed() -> None:
    """A row that computes an earlier row's answer again leaves it as lately used as the snapshot after it."""
    cache, keys = manager(num_blocks=16), BlockKeys(4, None)
    compute(cache, keys, 24, (8,))
    prefix = cache.find_prefix(keys, TOKENS, 28)
    assert (prefix.num_tokens, prefix.num_matched_tokens) == (8, 24)
    cache.adopt(1, prefix)
    cache.allocate(1, 8, 16)
    cache.register(1, keys, TOKENS[:24], 24)
    cache.take_snapshot(1, keys, TOKENS, 24)
    cache.snapshots.finished(cache.snapshots.take_moves())
    assert cache.audit()[0].cached == 0
    cache.free(1)
    cache.allocate(2, 0, 40)
    cache.audit()
    assert cache.find_prefix(keys, TOKENS, 28).num_tokens == 24


def test_a_row_that_adopted_a_prefix_and_computed_nothing_leaves_it() -> None:
    cache, keys = manager(num_blocks=16), BlockKeys(4, None)
    compute(cache, keys, 8, (8,))
    cache.adopt(1, cache.find_prefix(keys, TOKENS, 28))
    cache.free(1)
    cache.audit()
    assert cache.find_prefix(keys, TOKENS, 28).num_tokens == 8


@pytest.mark.parametrize("windows", [(None,), (None, 6)], ids=str)
def test_few_ends_of_blocks_are_looked_at(windows: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that wait are looked up before every step, perhaps hundreds of them with very long prompts."""
    cache, keys, asked = manager(windows), BlockKeys(4, None), list[int]()
    compute(cache, keys, 40, (8,))
    first_needed = GroupBlocks.first_needed

    def count(group: GroupBlocks, num_tokens: int) -> int:
        asked.append(num_tokens)
        return first_needed(group, num_tokens)

    monkeypatch.setattr(GroupBlocks, "first_needed", count)
    prefix = cache.find_prefix(keys, TOKENS, 40)
    assert (prefix.num_tokens, prefix.num_matched_tokens) == (8, 40)
    assert set(asked) == {40, 8}
    asked.clear()
    other = TOKENS.copy()
    other[4] += 1
    prefix = cache.find_prefix(BlockKeys(4, None), other, 40)
    assert (prefix.num_tokens, prefix.num_matched_tokens) == (0, 4)
    assert set(asked) <= {4, 0}


def test_a_prefix_that_was_used_just_now_outlives_an_older_one() -> None:
    """Also where the row that used it ends before it has filled a block of its own."""
    cache = KVCacheManager(
        [None], [8], block_size=4, num_rows=2, context_length=32, max_step_tokens=32, has_state=True, num_snapshots=4
    )

    def run(tokens: np.ndarray, num_tokens: int, snapshot: int = 0) -> int:
        keys = BlockKeys(4, None)
        prefix = cache.find_prefix(keys, tokens, len(tokens) - 1)
        cache.adopt(0, prefix)
        cache.allocate(0, prefix.num_tokens, num_tokens - prefix.num_tokens)
        if snapshot:
            cache.register(0, keys, tokens, len(tokens))
            cache.take_snapshot(0, keys, tokens, snapshot)
            cache.snapshots.finished(cache.snapshots.take_moves())
        cache.free(0)
        return prefix.num_tokens

    used, older = np.arange(13, dtype=np.int32), np.arange(100, 106, dtype=np.int32)
    run(used, 13, snapshot=12)
    run(older, 6, snapshot=4)
    assert run(used, 14) == 12
    run(np.arange(200, 220, dtype=np.int32), 20)
    assert run(used, 13) == 12
    assert run(older, 6) == 0
    cache.audit()
