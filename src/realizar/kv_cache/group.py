"""`GroupBlocks`: pool and block tables of one cache group."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from realizar.cache_kinds import CacheKind, attention_window
from realizar.kv_cache.block_pool import BlockCounts, BlockPool


class GroupBlocks:
    """The blocks that each row holds, for attention that sees all tokens or a window of them.

    `tables[row, j]` is the block of positions j * block_size and on, for `first[row] <= j < end[row]`, else 0.
    `on_evict` and `moves_keys` are as in `BlockPool`. UnsupportedModelError: the kind keeps no keys and values.
    """

    def __init__(
        self, kind: CacheKind, num_blocks: int, block_size: int, num_rows: int, max_blocks: int,
        on_evict: Callable[[bytes], None] | None = None, *, moves_keys: bool = False,
    ) -> None:  # fmt: skip
        self.window = attention_window(kind)
        self.pool = BlockPool(num_blocks, on_evict, moves_keys=moves_keys)
        self.block_size = block_size
        self.tables: NDArray[np.int32] = np.zeros((num_rows, max_blocks), np.int32)
        self.first = [0] * num_rows
        self.end = [0] * num_rows
        self._most_held = self.blocks_for(max_blocks * block_size, 1)
        self._num_growing = 0

    def first_needed(self, num_computed_tokens: int) -> int:
        """Index of the first block that a token at position `num_computed_tokens`, or a later one, sees."""
        return 0 if self.window is None else max(num_computed_tokens - self.window + 1, 0) // self.block_size

    def _first_kept(self, num_computed_tokens: int) -> int:
        """Index of the first block of a row: one that the last computed token sees."""
        return self.first_needed(max(num_computed_tokens - 1, 0))

    def blocks_for(self, num_tokens: int, max_step_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` holds at most, when at most `max_step_tokens` go through a step."""
        blocks = -(-num_tokens // self.block_size)
        if self.window is None:
            return blocks
        # A step's tokens, the one before, and the window - 1 before that, anywhere against the blocks' edges.
        return min(blocks, -(-(self.window + max_step_tokens - 1) // self.block_size) + 1)

    @property
    def max_tokens(self) -> int:
        table = self.tables.shape[1]
        fits = self.blocks_for(table * self.block_size, 1) <= self.pool.num_blocks
        return (table if fits else self.pool.num_blocks) * self.block_size

    @property
    def num_growing(self) -> int:
        """Rows that hold blocks, and fewer than they ever may."""
        return self._num_growing

    def _hold(self, row: int, first: int, end: int) -> None:
        before, now = self.end[row] - self.first[row], end - first
        self._num_growing += (0 < now < self._most_held) - (0 < before < self._most_held)
        self.first[row], self.end[row] = first, end

    def has_room(self, num_tokens: int, max_step_tokens: int, prefix: Sequence[int]) -> bool:
        """True if a new sequence that starts with the blocks of `prefix` fits, beside a block for each growing row."""
        in_use = sum(self.pool.ref_count(block) > 0 for block in prefix)
        wanted = self.blocks_for(num_tokens, max_step_tokens) - in_use
        return wanted + self.num_growing <= self.pool.num_available

    def runs(self, keys: Sequence[bytes]) -> list[int]:
        """The number of consecutive cached blocks just before each block j, 0 <= j <= len(keys).

        Where every token sees all blocks before it, the list ends at the first block that is missing.
        """
        runs = [0]
        for key in keys:
            is_cached = self.pool.find(key) is not None
            if not is_cached and self.window is None:
                break
            runs.append(runs[-1] + 1 if is_cached else 0)
        return runs

    def cached_prefix(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        """The blocks that the token after those of `keys` sees, all of them in the cache."""
        blocks = [self.pool.find(key) for key in keys[self.first_needed(len(keys) * self.block_size) :]]
        return tuple(block for block in blocks if block is not None)

    def adopt(self, row: int, end: int, blocks: Sequence[int]) -> None:
        """Let an empty row share cached blocks that end before index `end`."""
        self.pool.share(blocks)
        self._hold(row, end - len(blocks), end)
        self.tables[row, end - len(blocks) : end] = blocks

    def register(self, row: int, index: int, key: bytes) -> None:
        """Let the row's block at `index` be found, unless it is out of the window already."""
        if index >= self.first[row]:
            self.pool.register(int(self.tables[row, index]), key)

    def release(self, row: int, first: int) -> None:
        start = self.first[row]
        first = min(first, self.end[row])
        if first > start:
            self.pool.free(self.tables[row, start:first].tolist())
            self.tables[row, start:first] = 0
            self._hold(row, first, self.end[row])

    def fit(self, row: int, num_computed_tokens: int, num_tokens: int) -> int:
        """Number of the next `num_tokens` that the row's blocks and the free ones hold; may be more, or below 0."""
        start, end = self.first[row], self.end[row]
        own = end * self.block_size - num_computed_tokens
        if own >= num_tokens:
            return own
        first = self._first_kept(num_computed_tokens)
        released = self.tables[row, start : max(min(first, end), start)].tolist()
        freed = sum(self.pool.ref_count(block) == 1 for block in released)
        return own + (self.pool.num_available + freed) * self.block_size

    def extend(self, row: int, num_computed_tokens: int, num_tokens: int) -> None:
        """Release the blocks that are out of the window, then own those of the next `num_tokens`.

        The last token may be computed again.
        """
        if self.window is not None:
            self.release(row, self._first_kept(num_computed_tokens))
        end = -(-(num_computed_tokens + num_tokens) // self.block_size)
        if end > self.end[row]:
            self.tables[row, self.end[row] : end] = self.pool.allocate(end - self.end[row])
            self._hold(row, self.first[row], end)

    def steady_until(self, row: int) -> int:
        """The position from which on a decode of the row takes or releases a block."""
        end = self.end[row] * self.block_size
        if self.window is None:
            return end
        return min(end, (self.first[row] + 1) * self.block_size + self.window)

    def clear(self, row: int, useful: int) -> None:
        """Release all blocks of the row, the last first: in the cache a block is useless without those before it.

        Those from index `useful` on are of no use there, and are given up before any others.
        """
        first, end = self.first[row], self.end[row]
        useful = min(max(useful, first), end)
        self.pool.free(self.tables[row, useful:end].tolist(), useless=True)
        self.pool.free(reversed(self.tables[row, first:useful].tolist()))
        self.tables[row, first:end] = 0
        self._hold(row, 0, 0)

    def audit(self) -> BlockCounts:
        """Prove the reference counts, the pool and `num_growing`. RuntimeError: one is wrong."""
        counts = self.pool.audit()
        held = [end - first for first, end in zip(self.first, self.end, strict=True)]
        growing = sum(0 < count < self._most_held for count in held)
        if growing != self._num_growing:
            raise RuntimeError(f"{growing} rows hold KV blocks and may hold more, not {self._num_growing}")
        owned = np.zeros(self.pool.num_blocks, np.int64)
        for row, (first, end) in enumerate(zip(self.first, self.end, strict=True)):
            np.add.at(owned, self.tables[row, first:end], 1)
        wrong = [block for block in range(len(owned)) if owned[block] != self.pool.ref_count(block)]
        if wrong:
            raise RuntimeError(
                f"block tables hold KV block {wrong[0]} {owned[wrong[0]]} times, "
                f"and its reference count is {self.pool.ref_count(wrong[0])}"
            )
        return counts
