"""Reported changes of the prefix cache, put together again, are what the cache holds."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import pytest

from realizar.kv_cache.block_keys import KEY_BYTES, BlockKeys, CacheChanges
from realizar.kv_cache.manager import KVCacheManager

BLOCK = 4


class Mirror:
    """A cache as its reports tell of it."""

    def __init__(self) -> None:
        self.blocks: set[bytes] = set()
        self.ends: set[bytes] | None = None

    def take(self, changes: CacheChanges | None) -> None:
        if changes is None:
            return
        if changes.complete:
            self.blocks, self.ends = set(), None if changes.ends_added is None else set()
        self.blocks = (self.blocks - _keys(changes.removed)) | _keys(changes.added)
        assert (self.ends is None) is (changes.ends_added is None)
        if self.ends is not None and changes.ends_added is not None:
            self.ends = (self.ends - _keys(changes.ends_removed)) | _keys(changes.ends_added)


def _keys(column: bytes) -> set[bytes]:
    return {column[start : start + KEY_BYTES] for start in range(0, len(column), KEY_BYTES)}


def _cut(keys: Iterable[bytes]) -> set[bytes]:
    return {key[:KEY_BYTES] for key in keys}


def _manager(windows: tuple[int | None, ...], *, has_state: bool, num_host_snapshots: int) -> KVCacheManager:
    return KVCacheManager(
        windows,
        [14] * len(windows),
        block_size=BLOCK,
        num_rows=3,
        context_length=40,
        max_step_tokens=8,
        has_state=has_state,
        num_snapshots=3 if has_state else 0,
        num_host_snapshots=num_host_snapshots,
    )


def _run_row(manager: KVCacheManager, numbers: random.Random, row: int) -> None:
    """One sequence from its prefix to its end, with snapshots where there are states."""
    tokens = np.array([numbers.randrange(2)] * 8 + [numbers.randrange(9) for _ in range(16)], np.int32)
    keys = BlockKeys(BLOCK, None)
    prefix = manager.find_prefix(keys, tokens, len(tokens) - 1)
    if not manager.can_allocate(len(tokens), prefix):
        return
    manager.adopt(row, prefix)
    done = prefix.num_tokens
    while done < len(tokens):
        count = manager.allocate(row, done, min(8, len(tokens) - done))
        done += count
        manager.register(row, keys, tokens, done)
        if manager.has_state and done // BLOCK:
            manager.take_snapshot(row, keys, tokens, done // BLOCK * BLOCK)
            manager.snapshots.finished(manager.snapshots.take_moves())
    manager.free(row)


@pytest.mark.parametrize(
    ("windows", "has_state", "num_host_snapshots"),
    [((None,), False, 0), ((None, 8), False, 0), ((8,), False, 0), ((None,), True, 0), ((None,), True, 2)],
    ids=["full", "full and window", "window alone", "states", "states on the host too"],
)
def test_reports_put_together_are_what_the_cache_holds(
    windows: tuple[int | None, ...], has_state: bool, num_host_snapshots: int
) -> None:
    numbers, mirror = random.Random(3), Mirror()
    manager = _manager(windows, has_state=has_state, num_host_snapshots=num_host_snapshots)
    for _ in range(10):
        _run_row(manager, numbers, 0)
    assert manager.take_key_changes() is None
    manager.watch_keys()
    for turn in range(120):
        mirror.take(manager.take_key_changes())
        pools = [group.pool for group in manager._groups]
        assert mirror.blocks == _cut(pools[0].keys)
        if has_state:
            assert mirror.ends == _cut(manager.snapshots.keys)
        elif len(windows) > 1:
            assert mirror.ends == _cut(pools[1].keys)
        else:
            assert mirror.ends is None
        assert manager.take_key_changes() is None
        for _ in range(numbers.randrange(1, 4)):
            _run_row(manager, numbers, turn % 3)
        if numbers.random() < 0.1:
            manager.forget()
    assert mirror.blocks


def test_without_a_prefix_cache_nothing_is_reported() -> None:
    manager = KVCacheManager(
        [None], [14], block_size=BLOCK, num_rows=1, context_length=40, max_step_tokens=8,
        prefix_cache=False,
    )  # fmt: skip
    manager.watch_keys()
    _run_row(manager, random.Random(1), 0)
    assert manager.take_key_changes() is None
