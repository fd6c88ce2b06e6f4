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


def test_random_users_against_a_model() -> None:
    """Ten thousand operations beside a plain dictionary of counts."""
    rng = random.Random(3)
    pool, users = BlockPool(16), dict[int, int]()
    for _ in range(10_000):
        action = rng.random()
        if action < 0.4 and len(users) < 16:
            for block in pool.allocate(rng.randint(1, 16 - len(users))):
                assert block not in users
                users[block] = 1
        elif action < 0.6 and users:
            block = rng.choice(list(users))
            pool.share([block])
            users[block] += 1
        elif users:
            block = rng.choice(list(users))
            pool.free([block])
            users[block] -= 1
            if not users[block]:
                del users[block]
        assert pool.num_available == 16 - len(users)
        assert pool.audit() == BlockCounts(free=16 - len(users), used=len(users), total=16)


@pytest.mark.parametrize("damage", ["lost", "doubled", "used"])
def test_the_audit_sees_damage(damage: str) -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    if damage == "lost":
        pool._free.pop()
    elif damage == "doubled":
        pool._free.append(pool._free[-1])
    else:
        pool._users[pool._free[0]] = 1
    with pytest.raises(RuntimeError, match="KV block"):
        pool.audit()
