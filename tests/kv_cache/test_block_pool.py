"""Blocks are handed out once, shared by count, and always add up."""

from __future__ import annotations

import random

import pytest

from realizar.errors import CapacityError
from realizar.kv_cache.block_pool import BlockCounts, BlockPool


def test_all_blocks_come_out_once_and_go_back() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(5)
    assert sorted(blocks) == [0, 1, 2, 3, 4]
    assert pool.audit() == BlockCounts(free=0, used=5, total=5)
    pool.free(blocks)
    assert pool.audit() == BlockCounts(free=5, used=0, total=5)


def test_too_many_takes_nothing() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(CapacityError, match="2 KV blocks wanted, 1 of 3 free"):
        pool.allocate(2)
    assert pool.num_available == 1


def test_a_shared_block_is_free_when_its_last_user_leaves() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.free(blocks)
    assert pool.audit().used == 1
    pool.free(blocks)
    assert pool.audit().used == 0
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.free(blocks)
    with pytest.raises(RuntimeError, match="can't be shared"):
        pool.share(blocks)


def test_the_last_freed_comes_out_first() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.free([second])
    assert pool.allocate(1) == [second]
    assert first != second


def test_a_block_with_a_key_is_cached_when_its_last_user_leaves() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.register(block, b"key")
    assert pool.find(b"key") == block
    pool.free([block])
    assert pool.audit() == BlockCounts(free=2, used=0, total=3, cached=1)
    pool.share([block])
    assert pool.audit() == BlockCounts(free=2, used=1, total=3)
    pool.free([block])
    assert block not in pool.allocate(2)  # free ones first
    assert pool.allocate(1) == [block]
    assert pool.find(b"key") is None


def test_the_cached_block_left_longest_ago_goes_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.register(block, bytes([block]))
    pool.free([blocks[1], blocks[0], blocks[2]])
    pool.share([blocks[1]])
    pool.free([blocks[1]])
    assert [pool.allocate(1)[0] for _ in range(3)] == [blocks[0], blocks[2], blocks[1]]


def test_a_key_names_one_block_and_a_block_has_one_key() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"a")
    pool.register(second, b"a")
    pool.register(first, b"b")
    assert (pool.find(b"a"), pool.find(b"b")) == (first, None)
    pool.free([first, second])
    assert pool.audit() == BlockCounts(free=1, used=0, total=2, cached=1)
    with pytest.raises(RuntimeError, match="is not in use and can't get a key"):
        pool.register(second, b"c")


def test_a_block_in_use_takes_the_key_of_a_cached_one() -> None:
    """Both have the same contents, and the one that was used later is kept longer."""
    pool = BlockPool(2, moves_keys=True)
    first, second = pool.allocate(2)
    pool.register(first, b"a")
    pool.free([first])
    pool.register(second, b"a")
    assert pool.find(b"a") == second
    assert pool.audit() == BlockCounts(free=1, used=1, total=2)
    pool.free([second])
    assert pool.audit() == BlockCounts(free=1, used=0, total=2, cached=1)


def test_useless_blocks_go_before_all_others() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    for block in blocks:
        pool.register(block, bytes([block]))
    pool.free(blocks[:2])
    pool.free(blocks[2:], useless=True)
    assert [pool.allocate(1)[0] for _ in range(4)] == [blocks[3], blocks[2], blocks[0], blocks[1]]


def test_random_references_and_keys_against_a_model() -> None:
    """Ten thousand operations beside plain dictionaries of reference counts and keys, and a list of what is cached."""
    rng = random.Random(3)
    pool, counts, keys, cached = BlockPool(16), dict[int, int](), dict[int, bytes](), list[int]()
    for number in range(10_000):
        action = rng.random()
        if action < 0.35 and len(counts) < 16:
            count = rng.randint(1, 16 - len(counts))
            num_evicted = max(count - (16 - len(counts) - len(cached)), 0)
            evicted, cached = cached[:num_evicted], cached[num_evicted:]
            for block in evicted:
                del keys[block]
            blocks = pool.allocate(count)
            assert set(evicted) <= set(blocks)
            assert not set(blocks) & (counts.keys() | set(cached))
            counts |= dict.fromkeys(blocks, 1)
        elif action < 0.5 and (counts or cached):
            block = rng.choice([*counts, *cached])
            pool.share([block])
            counts[block] = counts.get(block, 0) + 1
            cached = [other for other in cached if other != block]
        elif action < 0.6 and counts:
            block = rng.choice(list(counts))
            pool.register(block, str(number).encode())
            keys.setdefault(block, str(number).encode())
        elif counts:
            block = rng.choice(list(counts))
            pool.free([block])
            counts[block] -= 1
            if not counts[block]:
                del counts[block]
                cached += [block] if block in keys else []
        free = 16 - len(counts) - len(cached)
        assert pool.num_available == 16 - len(counts)
        assert pool.audit() == pool.counts == BlockCounts(free, len(counts), 16, len(cached))
        assert all(pool.find(key) == block for block, key in keys.items())


@pytest.mark.parametrize("damage", ["lost", "doubled", "used", "cached", "key", "free key"])
def test_the_audit_sees_damage(damage: str) -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    if damage == "lost":
        pool._free.pop()
    elif damage == "doubled":
        pool._free.append(pool._free[-1])
    elif damage == "used":
        pool._ref_counts[pool._free[0]] = 1
    elif damage == "cached":
        pool._cached[pool._free[0]] = None
    elif damage == "key":
        pool._blocks[b"key"] = 0
    else:
        pool._keys[pool._free[0]], pool._blocks[b"key"] = b"key", pool._free[0]
    with pytest.raises(RuntimeError, match="KV block"):
        pool.audit()
