"""`BlockPool`: the blocks of one cache group and how many users each has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from realizar.errors import CapacityError


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks of a pool by state."""

    free: int
    used: int
    total: int


class BlockPool:
    """Hands out block numbers 0 .. num_blocks - 1.

    The block freed last is handed out first: its memory is the warmest, and memory never needed is never touched.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._users = [0] * num_blocks

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one user.

        Raises:
            CapacityError: fewer are free; nothing is taken.
        """
        if count > len(self._free):
            raise CapacityError(f"{count} KV blocks wanted, {len(self._free)} of {self._num_blocks} free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._users[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a user to each block, all of them in use."""
        for block in blocks:
            if self._users[block] == 0:
                raise RuntimeError(f"KV block {block} is free and can't be shared")
            self._users[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Take a user from each block; a block without users is free."""
        for block in blocks:
            if self._users[block] == 0:
                raise RuntimeError(f"KV block {block} is freed twice")
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free.append(block)

    def audit(self) -> BlockCounts:
        """Count the blocks by state from first principles.

        Raises:
            RuntimeError: a block is in two states or in none.
        """
        used = sum(users > 0 for users in self._users)
        free = set(self._free)
        if len(free) != len(self._free) or any(self._users[block] for block in free):
            raise RuntimeError("a free KV block is listed twice or has users")
        if len(free) + used != self._num_blocks:
            raise RuntimeError(f"{len(free)} KV blocks free + {used} used is not {self._num_blocks}")
        return BlockCounts(free=len(free), used=used, total=self._num_blocks)
