"""`KVCacheManager`: block tables per row and cache group, the slots that tokens are written to, and what is cached.

A model whose layers have a state goes on from cached blocks only where a snapshot of its state was taken after them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from realizar.kv_cache.block_keys import BlockKeys, CacheChanges, KeyLog
from realizar.kv_cache.block_pool import BlockCounts, BlockPool
from realizar.kv_cache.snapshot_tiers import Place, SnapshotTiers


class CacheWatch(Protocol):
    """Learns what can be found in a cache, and that nothing can any more."""

    def added(self, keys: Sequence[bytes]) -> None:
        """Blocks of a history are found from now on, in its order."""

    def snapped(self, key: bytes) -> None:
        """A snapshot is found from now on."""

    def forgotten(self) -> None: ...


_NEVER = np.iinfo(np.int32).max  # in place of a row's registered blocks: what it computes is not to be found


@dataclass(frozen=True, slots=True)
class Prefix:
    """Computed tokens that a sequence may start from.

    Attributes:
        num_tokens: a multiple of the block size.
        blocks: per cache group, those that the next token sees.
        snapshot: the key of the block before the snapshot of the state after these tokens; None where there are none,
            or the model has no state.
        num_matched_tokens: tokens whose blocks were found; more than `num_tokens` where the last snapshot is before
            their end.
    """

    num_tokens: int
    blocks: tuple[tuple[int, ...], ...]
    snapshot: bytes | None = None
    num_matched_tokens: int = 0


class KVCacheManager:
    """Owns the blocks of all cache groups.

    Args:
        windows, num_blocks: per cache group (`CacheGroup`).
        num_rows: rows that may hold blocks at once, `context_length` tokens each.
        max_step_tokens: tokens of one row in one step.
        prefix_cache: blocks are found by their contents, also after the sequence that computed them has ended.
        has_state: layers of the model have a state, which is not in blocks.
        num_snapshots: of states; without any, no blocks of a model with a state are found.

    Attributes:
        snapshots: of states.
        least_fetched_tokens: tokens that are sooner fetched than computed; a host snapshot that saves fewer is left.
        watch: is told of what is computed and can be found; None tells nobody.
    """

    def __init__(
        self, windows: Sequence[int | None], num_blocks: Sequence[int], *, block_size: int, num_rows: int,
        context_length: int, max_step_tokens: int, prefix_cache: bool = True, has_state: bool = False,
        num_snapshots: int = 0, num_host_snapshots: int = 0,
    ) -> None:  # fmt: skip
        self.block_size, self.num_rows = block_size, num_rows
        self.context_length, self.max_step_tokens = context_length, max_step_tokens
        self.prefix_cache = prefix_cache and (num_snapshots > 0 or not has_state)
        self.has_state = has_state
        self.snapshots = SnapshotTiers(num_snapshots if has_state and prefix_cache else 0, num_host_snapshots)
        self.least_fetched_tokens = 1
        self.watch: CacheWatch | None = None
        self._num_registered = np.zeros(num_rows, np.int32)  # blocks of each row, or _NEVER
        self._keys: list[Sequence[bytes]] = [()] * num_rows  # of each row's full blocks
        self._steady_until = np.zeros(num_rows, np.int32)  # the least of the groups' positions, by row
        self._watched: list[KeyLog] = []  # of blocks, and of those that a sequence can follow, if not any
        max_blocks = -(-context_length // block_size)
        on_evict = self.snapshots.drop if has_state else None
        pools = [BlockPool(count, on_evict, moves_keys=has_state) for count in num_blocks]
        self._groups = tuple(
            GroupBlocks(window, pool, block_size, num_rows, max_blocks)
            for window, pool in zip(windows, pools, strict=True)
        )
        self._whole_first = sorted(enumerate(self._groups), key=lambda each: each[1].window is not None)

    @property
    def counts(self) -> tuple[BlockCounts, ...]:
        return tuple(group.pool.counts for group in self._groups)

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that fits alone, in steps of one token if need be, and in a block table."""
        return min(group.max_tokens for group in self._groups)

    def find_prefix(self, keys: BlockKeys, token_ids: NDArray[np.int32], most_tokens: int) -> Prefix:
        """The longest start of `token_ids`, up to `most_tokens`, after which a sequence can go on from cached blocks.

        Full attention needs every block of it, a window the blocks that the next token sees, a state a snapshot.
        `token_ids` are all that are known of the sequence, int32 [tokens].
        """
        most = min(most_tokens, len(token_ids)) // self.block_size if self.prefix_cache else 0
        wanted = keys.of(token_ids)[:most] if most else ()
        blocks, tiers = [group.pool.has for group in self._groups], self.snapshots
        matched, end = self.usable(wanted, [*blocks, tiers.device.has])
        if tiers.host.num_blocks:
            least = max(-(-self.least_fetched_tokens // self.block_size), 1)
            _, later = self.usable(wanted[:matched], [*blocks, tiers.host.has])
            end = later if later >= end + least else end
        return Prefix(
            num_tokens=end * self.block_size,
            blocks=tuple(group.cached_prefix(wanted[:end]) for group in self._groups),
            snapshot=wanted[end - 1] if self.has_state and end else None,
            num_matched_tokens=matched * self.block_size,
        )

    def found(self, group: int, key: bytes) -> int | None:
        """The block of a cache group with a key, or the snapshot on the device of the part behind all groups."""
        pool = self._groups[group].pool if group < len(self._groups) else self.snapshots.device
        return pool.find(key)

    def has(self, part: int, key: bytes) -> bool:
        """True if a cache group has the block, or a memory of the part behind all groups the snapshot."""
        return self._groups[part].pool.has(key) if part < len(self._groups) else self.snapshots.has(key)

    def usable(self, keys: Sequence[bytes], has: Sequence[Callable[[bytes], bool]]) -> tuple[int, int]:
        """The blocks of a history after which the next token sees none but those there are; and the last of them after
        which a sequence can go on, of a model with a state where a snapshot follows. `has` says what there is, of each
        cache group and of snapshots.
        """
        runs: list[list[int]] = [[] for _ in self._groups]
        for index, group in self._whole_first:
            runs[index] = group.runs(keys, has[index])
            keys = keys[: len(runs[index]) - 1]
        matched = self._first_usable(runs, range(len(keys), 0, -1))
        if not self.has_state:
            return matched, matched
        return matched, self._first_usable(runs, (end for end in range(matched, 0, -1) if has[-1](keys[end - 1])))

    @property
    def whole_groups(self) -> list[int]:
        """Cache groups whose layers see all tokens."""
        return [index for index, group in enumerate(self._groups) if group.window is None]

    def seen_blocks(self, group: int, num_blocks: int) -> range:
        """Those of the first blocks of a history that the token after them sees."""
        return range(self._groups[group].first_needed(num_blocks * self.block_size), num_blocks)

    def put(self, group: int, keys: Sequence[bytes], history: Iterable[bytes]) -> list[int]:
        """Name blocks for some that are written before the next step, and found from now on: as many as there are
        beside those in use and those of their `history`.
        """
        pool, self.snapshots.row = self._groups[group].pool, None
        own = [block for block in map(pool.find, history) if block is not None]
        pool.share(own)
        blocks = pool.allocate(min(len(keys), pool.num_available))
        for block, key in zip(blocks, keys, strict=False):
            pool.register(block, key)
        pool.free(reversed(blocks))
        pool.free(reversed(own))
        return blocks

    def touch(self, group: int, keys: Iterable[bytes]) -> None:
        """Let cached blocks be given up last, the first ones after all others."""
        pool = self._groups[group].pool
        blocks = [block for block in map(pool.find, keys) if block is not None]
        pool.share(blocks)
        pool.free(reversed(blocks))

    def _first_usable(self, runs: Sequence[Sequence[int]], ends: Iterable[int]) -> int:
        """The first of `ends` after which all blocks that the next token sees are cached, or 0; `runs` by group."""
        for end in ends:
            groups = zip(runs, self._groups, strict=True)
            if all(run[end] >= end - group.first_needed(end * self.block_size) for run, group in groups):
                return end
        return 0

    def adopt(self, row: int, prefix: Prefix) -> None:
        """Let an empty row start from a prefix found just now."""
        end = prefix.num_tokens // self.block_size
        self._num_registered[row], self._steady_until[row] = end, 0
        for group, blocks in zip(self._groups, prefix.blocks, strict=True):
            group.adopt(row, end, blocks)

    def have_new_blocks(
        self, rows: NDArray[np.intp], num_known: NDArray[np.int32], num_computed: NDArray[np.int32]
    ) -> NDArray[np.bool_]:
        """bool [rows]: rows with full blocks that are to be registered. All arguments are [rows]."""
        new: NDArray[np.bool_] = np.minimum(num_known, num_computed) // self.block_size > self._num_registered[rows]
        return new

    def register(self, row: int, keys: BlockKeys, token_ids: NDArray[np.int32], num_computed_tokens: int) -> None:
        """Let the row's full blocks be found; their tokens are known, and computed by steps submitted by now."""
        end = min(num_computed_tokens, len(token_ids)) // self.block_size
        start = int(self._num_registered[row])
        if end <= start or not self.prefix_cache:
            return
        block_keys = keys.of(token_ids)
        for index in range(start, end):
            for group in self._groups:
                group.register(row, index, block_keys[index])
        self._num_registered[row], self._keys[row] = end, block_keys
        if self.watch is not None:
            self.watch.added(block_keys[start:end])

    def lets_find(self, row: int) -> bool:
        """True if what the row computes is to be found by others, now or later."""
        return self.prefix_cache and self._num_registered[row] != _NEVER

    def forget(self) -> None:
        """Let no block or snapshot be found that is there now, nor later what rows that are open go on to compute."""
        self._num_registered[:] = _NEVER
        for group in self._groups:
            group.pool.forget()
        self.snapshots.forget()
        if self.watch is not None:
            self.watch.forgotten()

    def watch_keys(self) -> None:
        """Note changes of what can be found from now on, beginning with all that is there.

        Keys of full attention stand for blocks. A sequence can go on after those of a snapshot, or of a window's block.
        """
        if not self.prefix_cache or not self._groups:
            return
        whole = [group.pool for group in self._groups if group.window is None]
        windows = [group.pool for group in self._groups if group.window is not None]
        watched: list[BlockPool | SnapshotTiers] = [(whole or windows)[0]]
        if self.has_state or (whole and windows):
            watched.append(self.snapshots if self.has_state else windows[0])
        for each in watched:
            each.log.begin(each.keys)
        self._watched = [each.log for each in watched]

    def take_key_changes(self) -> CacheChanges | None:
        """The changes since the last call, at first all keys; None where nothing changed."""
        if not any(self._watched):
            return None
        blocks, *ends = self._watched
        complete = blocks.is_complete
        ends_added, ends_removed = ends[0].take() if ends else (None, b"")
        return CacheChanges(*blocks.take(), ends_added, ends_removed, complete)

    def take_snapshot(
        self, row: int, keys: BlockKeys, token_ids: NDArray[np.int32], num_tokens: int, client: str = "",
        place: Place | None = None,
    ) -> bytes | None:  # fmt: skip
        """Take a snapshot of a row in the step that is being scheduled, after tokens in full, registered blocks.

        Returns its key; None where nothing of the row is to be found.
        """
        if not self.lets_find(row):
            return None
        key = keys.of(token_ids)[num_tokens // self.block_size - 1]
        self.snapshots.take(row, key, client, place)
        if self.watch is not None:
            self.watch.snapped(key)
        return key

    def name_snapshot(self, row: int, snapshot: int, key: bytes, client: str, place: Place) -> bool:
        """Let a row's unnamed snapshot be found, after the block of a key; False if that is not found itself."""
        if not self.lets_find(row) or not all(group.pool.has(key) for group in self._groups):
            self.snapshots.give_back(snapshot)
            return False
        self.snapshots.name(row, snapshot, key, client, place)
        if self.watch is not None:
            self.watch.snapped(key)
        return True

    def can_allocate(self, num_tokens: int, prefix: Prefix | None = None) -> bool:
        """True if a new sequence of `num_tokens` tokens fits now, beside a block for each row that may grow."""
        return all(
            group.has_room(num_tokens, self.max_step_tokens, prefix.blocks[index] if prefix else ())
            for index, group in enumerate(self._groups)
        )

    def allocate(self, row: int, num_computed_tokens: int, num_tokens: int) -> int:
        """Own the blocks of up to `num_tokens` next tokens; release those out of a window. Returns the tokens owned."""
        count = min(num_tokens, min([group.fit(row, num_computed_tokens, num_tokens) for group in self._groups]))
        if count <= 0:
            return 0
        self.snapshots.row = row
        for group in self._groups:
            group.extend(row, num_computed_tokens, count)
        self._steady_until[row] = min([group.steady_until(row) for group in self._groups])
        return count

    def num_steady(self, rows: NDArray[np.intp], num_computed: NDArray[np.int32]) -> NDArray[np.int32]:
        """int32 [rows]: tokens that a row can go on by with the blocks it has. Both arguments are [rows]."""
        return self._steady_until[rows] - num_computed

    def free(self, row: int) -> None:
        """Release all blocks of the row. Those after the last snapshot are of no use to a model with a state."""
        useful, keys = int(self._num_registered[row]), self._keys[row]
        if useful == _NEVER:
            useful = 0  # its blocks have no keys
        while self.has_state and useful and keys and not self.snapshots.has(keys[useful - 1]):
            useful -= 1  # without keys there are none but those of the prefix that it started from
        self._num_registered[row] = self._steady_until[row] = 0
        self._keys[row] = ()
        for group in self._groups:
            group.clear(row, useful if self.has_state else group.end[row])

    def block_tables(self, rows: NDArray[np.intp], num_tokens: int) -> tuple[NDArray[np.int32], ...]:
        """Per cache group int32 [rows, blocks], copied, wide enough for the longest row's `num_tokens`."""
        width = -(-num_tokens // self.block_size)
        return tuple([group.tables[rows, :width] for group in self._groups])

    def slot_mapping(self, rows: NDArray[np.intp], positions: NDArray[np.int32]) -> tuple[NDArray[np.int32], ...]:
        """Per cache group int32 [tokens]: the slots of the tokens at `positions` of `rows`, both [tokens]."""
        size = np.int32(self.block_size)
        index = (positions // size).astype(np.intp)
        offsets = positions % size
        return tuple([group.tables[rows, index] * size + offsets for group in self._groups])

    def audit(self) -> tuple[BlockCounts, ...]:
        """Prove the counts of blocks and references, and that snapshots have their blocks, else raise RuntimeError."""
        counts = tuple(group.audit() for group in self._groups)
        self.snapshots.audit(lambda key: all(group.pool.has(key) for group in self._groups))
        return counts


class GroupBlocks:
    """The blocks that each row holds, for attention that sees all tokens or a window of them.

    `tables[row, j]` is the block of positions j * block_size and on, for `first[row] <= j < end[row]`, else 0.
    `num_growing` rows hold blocks, and fewer than they ever may.
    """

    def __init__(self, window: int | None, pool: BlockPool, block_size: int, num_rows: int, max_blocks: int) -> None:
        self.window, self.pool, self.block_size = window, pool, block_size
        self.tables: NDArray[np.int32] = np.zeros((num_rows, max_blocks), np.int32)
        self.first = [0] * num_rows
        self.end = [0] * num_rows
        self._most_held = self.blocks_for(max_blocks * block_size, 1)
        self.num_growing = 0

    def first_needed(self, num_computed_tokens: int) -> int:
        """Index of the first block that a token at position `num_computed_tokens`, or a later one, sees."""
        return 0 if self.window is None else max(num_computed_tokens - self.window + 1, 0) // self.block_size

    def _first_kept(self, num_computed_tokens: int) -> int:
        """Index of the first block that the last computed token sees, which may be computed again."""
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
        fits = self._most_held <= self.pool.num_blocks
        return (self.tables.shape[1] if fits else self.pool.num_blocks) * self.block_size

    def has_room(self, num_tokens: int, max_step_tokens: int, prefix: Sequence[int]) -> bool:
        """True if a new sequence that starts with the blocks of `prefix` fits, beside a block for each growing row."""
        in_use = sum(self.pool.ref_count(block) > 0 for block in prefix)
        return self.blocks_for(num_tokens, max_step_tokens) - in_use + self.num_growing <= self.pool.num_available

    def _hold(self, row: int, first: int, end: int) -> None:
        before, now = self.end[row] - self.first[row], end - first
        self.num_growing += (0 < now < self._most_held) - (0 < before < self._most_held)
        self.first[row], self.end[row] = first, end

    def runs(self, keys: Sequence[bytes], has: Callable[[bytes], bool]) -> list[int]:
        """The number of cached blocks just before each block; without a window only up to the first that is missing."""
        runs = [0]
        for key in keys:
            is_cached = has(key)
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
        """Release the blocks that are out of the window, then own those of the next `num_tokens`."""
        start, held = self.first[row], self.end[row]
        first = max(min(self._first_kept(num_computed_tokens), held), start)
        if first > start:
            self.pool.free(self.tables[row, start:first].tolist())
            self.tables[row, start:first] = 0
        end = max(-(-(num_computed_tokens + num_tokens) // self.block_size), held)
        if end > held:
            self.tables[row, held:end] = self.pool.allocate(end - held)
        self._hold(row, first, end)

    def steady_until(self, row: int) -> int:
        """The position from which on a decode of the row takes or releases a block."""
        end = self.end[row] * self.block_size
        if self.window is None:
            return end
        return min(end, (self.first[row] + 1) * self.block_size + self.window)

    def clear(self, row: int, useful: int) -> None:
        """Release all blocks of the row, the last first: in the cache a block is useless without those before it, and
        all from index `useful` on are.
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
        growing = sum(0 < end - first < self._most_held for first, end in zip(self.first, self.end, strict=True))
        if growing != self.num_growing:
            raise RuntimeError(f"{growing} rows hold KV blocks and may hold more, not {self.num_growing}")
        owned = np.zeros(self.pool.num_blocks, np.int64)
        for row, (first, end) in enumerate(zip(self.first, self.end, strict=True)):
            np.add.at(owned, self.tables[row, first:end], 1)
        for block, held in enumerate(owned.tolist()):
            if held != (count := self.pool.ref_count(block)):
                raise RuntimeError(
                    f"block tables hold KV block {block} {held} times, and its reference count is {count}"
                )
        return counts
