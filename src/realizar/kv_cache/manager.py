"""`KVCacheManager`: block tables per row and cache group, and the slots that tokens are written to."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from realizar.kv_cache.block_pool import BlockCounts, BlockPool


class _Group:
    """Pool and block tables of one cache group.

    `tables[row, j]` is the block of positions j * block_size and on, for `first[row] <= j < end[row]`, else 0.
    """

    def __init__(self, window: int | None, num_blocks: int, block_size: int, num_rows: int, max_blocks: int) -> None:
        self.window = window
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.tables: NDArray[np.int32] = np.zeros((num_rows, max_blocks), np.int32)
        self.first = [0] * num_rows
        self.end = [0] * num_rows

    def first_needed(self, num_computed_tokens: int) -> int:
        """Index of the first block that a token at position `num_computed_tokens`, or a later one, sees."""
        return 0 if self.window is None else max(num_computed_tokens - self.window + 1, 0) // self.block_size

    def blocks_for(self, num_tokens: int, max_step_tokens: int) -> int:
        """Blocks that a sequence of `num_tokens` holds at most, when at most `max_step_tokens` go through a step."""
        blocks = -(-num_tokens // self.block_size)
        if self.window is None:
            return blocks
        # A step's tokens and the window - 1 before them, anywhere against the blocks' edges.
        return min(blocks, -(-(self.window - 1 + max_step_tokens - 1) // self.block_size) + 1)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that fits when it is alone."""
        table = self.tables.shape[1]
        fits = self.blocks_for(table * self.block_size, 1) <= self.pool.num_blocks
        return (table if fits else self.pool.num_blocks) * self.block_size

    @property
    def num_growing(self) -> int:
        """Rows that hold blocks, and fewer than they ever may."""
        most = self.blocks_for(self.tables.shape[1] * self.block_size, 1)
        return sum(0 < end - first < most for first, end in zip(self.first, self.end, strict=True))

    def release(self, row: int, first: int) -> None:
        """Free the row's blocks before index `first`."""
        start = self.first[row]
        first = min(first, self.end[row])
        if first > start:
            self.pool.free(self.tables[row, start:first].tolist())
            self.tables[row, start:first] = 0
            self.first[row] = first

    def fit(self, row: int, num_computed_tokens: int, num_tokens: int) -> int:
        """How many of the next `num_tokens` the row's blocks and the free ones hold; may be more, or below 0."""
        end = self.end[row]
        own = end * self.block_size - num_computed_tokens
        if own >= num_tokens:
            return own
        start = self.first[row]
        left = min(max(self.first_needed(num_computed_tokens) - start, 0), end - start)
        return own + (self.pool.num_free + left) * self.block_size

    def extend(self, row: int, num_computed_tokens: int, num_tokens: int) -> None:
        """Free what left the window, then own the blocks of the next `num_tokens`."""
        if self.window is not None:
            self.release(row, self.first_needed(num_computed_tokens))
        end = -(-(num_computed_tokens + num_tokens) // self.block_size)
        if end > self.end[row]:
            self.tables[row, self.end[row] : end] = self.pool.allocate(end - self.end[row])
            self.end[row] = end

    def clear(self, row: int) -> None:
        """Free all blocks of the row."""
        self.release(row, self.end[row])
        self.first[row] = self.end[row] = 0

    def audit(self) -> BlockCounts:
        counts = self.pool.audit()
        owned = [
            block
            for row in range(len(self.first))
            for block in self.tables[row, self.first[row] : self.end[row]].tolist()
        ]
        if len(owned) != counts.used or len(set(owned)) != len(owned):
            raise RuntimeError(f"block tables hold {len(owned)} KV blocks, {counts.used} are in use")
        return counts


class KVCacheManager:
    """Owns the blocks of all cache groups.

    Args:
        windows: per cache group its window in tokens, or None for full attention.
        num_blocks: per cache group.
        block_size: tokens per block.
        num_rows: rows that may hold blocks at once.
        context_length: tokens per row.
        max_step_tokens: tokens of one row in one step.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        num_blocks: Sequence[int],
        *,
        block_size: int,
        num_rows: int,
        context_length: int,
        max_step_tokens: int,
    ) -> None:
        self._block_size = block_size
        self._max_step_tokens = max_step_tokens
        max_blocks = -(-context_length // block_size)
        self._groups = tuple(
            _Group(window, count, block_size, num_rows, max_blocks)
            for window, count in zip(windows, num_blocks, strict=True)
        )

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def num_free_blocks(self) -> tuple[int, ...]:
        """Per cache group."""
        return tuple(group.pool.num_free for group in self._groups)

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Per cache group."""
        return tuple(group.pool.num_blocks for group in self._groups)

    def holds(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens fits when it is alone, in steps of one token if need be."""
        return all(group.blocks_for(num_tokens, 1) <= group.pool.num_blocks for group in self._groups)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that fits when it is alone; bounded by the block tables."""
        return min(group.max_tokens for group in self._groups)

    def can_allocate(self, num_tokens: int) -> bool:
        """Whether a new sequence of so many tokens fits now, with one more block for each row that may still grow."""
        return all(
            group.blocks_for(num_tokens, self._max_step_tokens) + group.num_growing <= group.pool.num_free
            for group in self._groups
        )

    def allocate(self, row: int, num_computed_tokens: int, num_tokens: int) -> int:
        """Own the blocks of the row's next tokens, up to `num_tokens` of them, and free those that left a window.

        Returns:
            The tokens whose blocks the row now owns; 0 when not even one fits.
        """
        count = min(num_tokens, min([group.fit(row, num_computed_tokens, num_tokens) for group in self._groups]))
        if count <= 0:
            return 0
        for group in self._groups:
            group.extend(row, num_computed_tokens, count)
        return count

    def free(self, row: int) -> None:
        """Free all blocks of the row."""
        for group in self._groups:
            group.clear(row)

    def block_tables(self, rows: NDArray[np.int32], num_tokens: int) -> tuple[NDArray[np.int32], ...]:
        """Per cache group int32 [rows, blocks], copied, wide enough for the longest row's `num_tokens`."""
        width = -(-num_tokens // self._block_size)
        return tuple(group.tables[rows, :width] for group in self._groups)

    def slot_mapping(self, rows: NDArray[np.int32], positions: NDArray[np.int32]) -> tuple[NDArray[np.int32], ...]:
        """Per cache group int32 [tokens]: the slots of the tokens at `positions` of `rows`, both [tokens]."""
        index, place = np.divmod(positions, np.int32(self._block_size))
        return tuple(group.tables[rows, index] * np.int32(self._block_size) + place for group in self._groups)

    def audit(self) -> tuple[BlockCounts, ...]:
        """Prove, per cache group, that free + used = total and that the tables hold the used blocks, each once.

        Raises:
            RuntimeError: it is not so.
        """
        return tuple(group.audit() for group in self._groups)
