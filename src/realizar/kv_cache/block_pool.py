"""`BlockPool`: blocks of memory with their reference counts, and the cached contents of unused blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from realizar.errors import CapacityError
from realizar.kv_cache.block_keys import KeyLog


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks of a pool by state. A cached block has no reference and keeps its contents until it is allocated again."""

    free: int
    used: int
    total: int
    cached: int = 0


class BlockPool:
    """Hands out block numbers 0 .. num_blocks - 1.

    The block freed last is handed out first: its memory is the warmest, and memory never needed is never touched. When
    none is free, the least recently used cached block loses its key and is handed out.

    Args:
        on_evict: called with the key that a block loses so.
        moves_keys: a block in use takes its key from an equal one that is cached, as it was used later.
        kind: of block, in errors.

    Attributes:
        log: of its keys.
    """

    def __init__(
        self, num_blocks: int, on_evict: Callable[[bytes], None] | None = None, *, moves_keys: bool = False,
        kind: str = "KV block",
    ) -> None:  # fmt: skip
        self.num_blocks, self._on_evict, self._moves_keys, self._kind = num_blocks, on_evict, moves_keys, kind
        self._free = list(range(num_blocks - 1, -1, -1))
        self._ref_counts = [0] * num_blocks
        self._keys: dict[int, bytes] = {}
        self._blocks: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # with no reference, least recently used first
        self.log = KeyLog()

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def counts(self) -> BlockCounts:
        free, cached = len(self._free), len(self._cached)
        return BlockCounts(free, self.num_blocks - free - cached, self.num_blocks, cached)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference. CapacityError: fewer are available; nothing is taken."""
        if count > self.num_available:
            raise CapacityError(f"{count} {self._kind}s wanted, {self.num_available} of {self.num_blocks} free")
        blocks = []
        for _ in range(count):
            if not self._free:
                key = next(self.cached_keys())
                self.drop(key)
                if self._on_evict is not None:
                    self._on_evict(key)
            blocks.append(self._free.pop())
            self._ref_counts[blocks[-1]] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block, all of them in use or cached."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                if block not in self._cached:
                    raise RuntimeError(f"{self._kind} {block} is free and can't be shared")
                del self._cached[block]
            self._ref_counts[block] += 1

    def free(self, blocks: Iterable[int], *, useless: bool = False) -> None:
        """Drop a reference to each block; at 0, one with a key is cached, and a `useless` one is given up first."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                raise RuntimeError(f"{self._kind} {block} is freed twice")
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if block in self._keys:
                    self._cached[block] = None
                    if useless:
                        self._cached.move_to_end(block, last=False)
                else:
                    self._free.append(block)

    def register(self, block: int, key: bytes) -> None:
        """Let a block in use be found by its key, unless it has one, or another block has that key and keeps it."""
        if self._ref_counts[block] == 0:
            raise RuntimeError(f"{self._kind} {block} is not in use and can't get a key")
        if block in self._keys:
            return
        other = self._blocks.get(key)
        if other is not None and not (self._moves_keys and other in self._cached):
            return
        self.drop(key)
        self._keys[block], self._blocks[key] = key, block
        self.log.note(key, is_there=True)

    def drop(self, key: bytes) -> None:
        """Take a key from its block, which is free then, or when its last reference is dropped; unknown keys pass."""
        block = self._blocks.pop(key, None)
        if block is None:
            return
        del self._keys[block]
        self.log.note(key, is_there=False)
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def forget(self) -> None:
        """Take every block's key away: what was cached is free, and nothing is found any more."""
        self._keys.clear()
        self._blocks.clear()
        self._free.extend(reversed(self._cached))
        self._cached.clear()
        self.log.clear()

    @property
    def keys(self) -> Collection[bytes]:
        return self._blocks.keys()

    def cached_keys(self) -> Iterator[bytes]:
        """Keys of the blocks without a reference, the least recently used first."""
        return (self._keys[block] for block in self._cached)

    def find(self, key: bytes) -> int | None:
        return self._blocks.get(key)

    def has(self, key: bytes) -> bool:
        return key in self._blocks

    def audit(self) -> BlockCounts:
        """Count blocks from first principles. RuntimeError: a block is in two states or none, or keys are wrong."""
        used = [block for block, count in enumerate(self._ref_counts) if count > 0]
        if sorted([*self._free, *used, *self._cached]) != list(range(self.num_blocks)):
            states = f"{self._free} are free, {used} used and {[*self._cached]} cached"
            raise RuntimeError(f"of {self.num_blocks} {self._kind}s, {states}")
        if self._blocks != {key: block for block, key in self._keys.items()}:
            raise RuntimeError(f"keys and {self._kind}s disagree")
        if not self._cached.keys() <= self._keys.keys() or self._keys.keys() & self._free:
            raise RuntimeError(f"a cached {self._kind} has no key, or a free one has one")
        return self.counts
