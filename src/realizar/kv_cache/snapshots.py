"""`SnapshotPool`: copies of rows' states at block ends, found by the key of the block that they follow.

A model whose layers have a state goes on from a prefix only where its state after that prefix was kept. A snapshot is
such a copy. Nothing changes it once it is taken; its memory belongs to the backend.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import numpy as np

from realizar.kv_cache.key_changes import KeyLog


@dataclass(frozen=True, slots=True)
class SnapshotCounts:
    """Snapshots of a pool now, and counts since the start.

    Attributes:
        total: snapshots that there is memory for. kept: those that can be found.
        taken, restored: copies from a row and to a row.
        dropped: snapshots given up for others, with the block that they follow, or with the whole prefix cache.
    """

    total: int = 0
    kept: int = 0
    taken: int = 0
    restored: int = 0
    dropped: int = 0


class SnapshotPool:
    """Hands out snapshot numbers 0 .. num_snapshots - 1.

    When none is free, the least recently used one is dropped, unless a step in flight names it. The number of a
    snapshot is used again when the last step that names it is done.

    Attributes:
        log: notes the keys that snapshots can be found by; None notes none.
    """

    def __init__(self, num_snapshots: int) -> None:
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._steps = np.zeros(num_snapshots, np.int32)  # in flight, that name each snapshot
        self._keys: OrderedDict[int, bytes] = OrderedDict()  # least recently used first
        self._snapshots: dict[bytes, int] = {}
        self._draining: set[int] = set()  # dropped, and named by a step in flight
        self._taken = self._restored = self._dropped = 0
        self.log: KeyLog | None = None

    @property
    def counts(self) -> SnapshotCounts:
        return SnapshotCounts(len(self._steps), len(self._keys), self._taken, self._restored, self._dropped)

    @property
    def keys(self) -> Collection[bytes]:
        """The keys that snapshots can be found by."""
        return self._snapshots.keys()

    def find(self, key: bytes) -> int | None:
        """The snapshot that follows the block with this key."""
        return self._snapshots.get(key)

    def restore(self, snapshot: int) -> None:
        """Name a kept snapshot in the step that is being scheduled; it becomes the most recently used one."""
        self._keys.move_to_end(snapshot)
        self._steps[snapshot] += 1
        self._restored += 1

    def take(self, key: bytes) -> int | None:
        """Name memory for a new snapshot in the step that is being scheduled, from which on it is found.

        Returns:
            None if there is one with this key, or steps in flight name all of them.
        """
        if key in self._snapshots:
            return None
        if not self._free:
            oldest = next((each for each in self._keys if not self._steps[each]), None)
            if oldest is None:
                return None
            self.drop(self._keys[oldest])
        snapshot = self._free.pop()
        self._keys[snapshot], self._snapshots[key] = key, snapshot
        self._steps[snapshot] += 1
        self._taken += 1
        if self.log is not None:
            self.log.add(key)
        return snapshot

    def drop(self, key: bytes) -> None:
        """Let the snapshot with this key be found no more; unknown keys pass."""
        snapshot = self._snapshots.pop(key, None)
        if snapshot is None:
            return
        del self._keys[snapshot]
        self._dropped += 1
        if self.log is not None:
            self.log.drop(key)
        if self._steps[snapshot]:
            self._draining.add(snapshot)
        else:
            self._free.append(snapshot)

    def forget(self) -> None:
        """Drop all snapshots."""
        for key in list(self._snapshots):
            self.drop(key)

    def finished(self, snapshots: Iterable[int]) -> None:
        """Note that a step that names these snapshots is done, or was given up."""
        for snapshot in snapshots:
            self._steps[snapshot] -= 1
            if snapshot in self._draining and not self._steps[snapshot]:
                self._draining.remove(snapshot)
                self._free.append(snapshot)

    def audit(self, has_block: Callable[[bytes], bool]) -> None:
        """Prove that every snapshot is free, kept or draining, and only one of these, and that kept ones have a block.

        Args:
            has_block: true if a block with this key is in the cache.

        Raises:
            RuntimeError: it is not so.
        """
        numbers = [*self._free, *self._keys, *self._draining]
        if sorted(numbers) != list(range(len(self._steps))):
            raise RuntimeError(f"snapshots {sorted(numbers)} are free, kept or draining, of {len(self._steps)}")
        if self._snapshots != {key: snapshot for snapshot, key in self._keys.items()}:
            raise RuntimeError("keys and snapshots disagree")
        if self._steps.size and self._steps.min() < 0:
            raise RuntimeError("a snapshot has ended more steps than it was in")
        if self._steps[self._free].any() or not self._steps[list(self._draining)].all():
            raise RuntimeError("a free snapshot is named by a step in flight, or a draining one by none")
        if not all(has_block(key) for key in self._snapshots):
            raise RuntimeError("a snapshot is kept without the block that it follows")
