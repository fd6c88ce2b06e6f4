"""`SnapshotPool`: copies of rows' states at block ends, found by the key of the block that they follow.

Nothing changes a snapshot once it is taken; its memory belongs to the backend.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np


class GivenUp(NamedTuple):
    """A snapshot that was dropped for another: its key, and the client that it was taken for."""

    key: bytes
    client: str


class SnapshotPool:
    """Hands out snapshot numbers 0 .. num_snapshots - 1 of one memory.

    When none is free, one that no step in flight names is dropped: the least recently used one of a client that has
    more than half of them, or would then, and otherwise of all. So many long prompts of one client leave the others at
    least half, of which nobody has a part for good. The number of a snapshot is used again when the last step that
    names it is done.
    """

    def __init__(self, num_snapshots: int) -> None:
        self._free = list(range(num_snapshots - 1, -1, -1))
        self._steps = np.zeros(num_snapshots, np.int32)  # in flight, that name each snapshot
        self._keys: OrderedDict[int, bytes] = OrderedDict()  # least recently used first
        self._snapshots: dict[bytes, int] = {}
        self._clients: dict[int, str] = {}
        self._held: Counter[str] = Counter()  # by client
        self._draining: set[int] = set()  # dropped, and named by a step in flight

    @property
    def num_snapshots(self) -> int:
        return len(self._steps)

    @property
    def num_kept(self) -> int:
        return len(self._keys)

    @property
    def keys(self) -> Sequence[bytes]:
        """Keys of kept snapshots, the least recently used first."""
        return tuple(self._keys.values())

    def find(self, key: bytes) -> int | None:
        return self._snapshots.get(key)

    def key_of(self, snapshot: int) -> bytes:
        return self._keys[snapshot]

    def client_of(self, snapshot: int) -> str:
        return self._clients[snapshot]

    def touch(self, snapshot: int) -> None:
        self._keys.move_to_end(snapshot)

    def use(self, snapshot: int) -> None:
        """Name a kept snapshot in the step that is being scheduled; it becomes the most recently used one."""
        self.touch(snapshot)
        self._steps[snapshot] += 1

    def make_room(self, client: str = "") -> GivenUp | None:
        """Drop a snapshot for one of this client; None if one is free, or steps in flight name all that are kept."""
        if self._free:
            return None
        oldest = self._oldest(self._greedy(client))
        if oldest is None:
            oldest = self._oldest(None)
        if oldest is None:
            return None
        given_up = GivenUp(self._keys[oldest], self._clients[oldest])
        self.drop(given_up.key)
        return given_up

    def take(self, key: bytes, client: str = "") -> int | None:
        """Name memory for a new snapshot in the step that is being scheduled, from which on it is found.

        It returns None if there is one with this key, or steps in flight name all of them.
        """
        if key in self._snapshots:
            return None
        self.make_room(client)
        if not self._free:
            return None
        snapshot = self._free.pop()
        self._keys[snapshot], self._snapshots[key], self._clients[snapshot] = key, snapshot, client
        self._held[client] += 1
        self._steps[snapshot] += 1
        return snapshot

    def drop(self, key: bytes) -> None:
        """Let the snapshot with this key be found no more; unknown keys pass."""
        snapshot = self._snapshots.pop(key, None)
        if snapshot is None:
            return
        del self._keys[snapshot]
        client = self._clients.pop(snapshot)
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        if self._steps[snapshot]:
            self._draining.add(snapshot)
        else:
            self._free.append(snapshot)

    def finished(self, snapshots: Iterable[int]) -> None:
        """Note that a step that names these snapshots is done, or was given up."""
        for snapshot in snapshots:
            self._steps[snapshot] -= 1
            if snapshot in self._draining and not self._steps[snapshot]:
                self._draining.remove(snapshot)
                self._free.append(snapshot)

    def audit(self, has_block: Callable[[bytes], bool]) -> None:
        """Prove that every snapshot is free, kept or draining, and only one of these, and that kept ones have a block.

        It raises RuntimeError if it is not so.
        """
        numbers = [*self._free, *self._keys, *self._draining]
        if sorted(numbers) != list(range(len(self._steps))):
            raise RuntimeError(f"snapshots {sorted(numbers)} are free, kept or draining, of {len(self._steps)}")
        if self._snapshots != {key: snapshot for snapshot, key in self._keys.items()}:
            raise RuntimeError("keys and snapshots disagree")
        if self._clients.keys() != self._keys.keys() or Counter(self._clients.values()) != self._held:
            raise RuntimeError("clients and snapshots disagree")
        if self._steps.size and self._steps.min() < 0:
            raise RuntimeError("a snapshot has ended more steps than it was in")
        if self._steps[self._free].any() or not self._steps[list(self._draining)].all():
            raise RuntimeError("a free snapshot is named by a step in flight, or a draining one by none")
        if not all(has_block(key) for key in self._snapshots):
            raise RuntimeError("a snapshot is kept without the block that it follows")

    def _greedy(self, client: str) -> str | None:
        """The client that has more than half of all snapshots, or would with one more for `client`."""
        half = len(self._steps) / 2
        if self._held[client] + 1 > half:
            return client
        return next((other for other, count in self._held.most_common(1) if count > half), None)

    def _oldest(self, client: str | None) -> int | None:
        """The least recently used snapshot of a client, or of all, that no step in flight names."""
        for snapshot in self._keys:
            if not self._steps[snapshot] and (client is None or self._clients[snapshot] == client):
                return snapshot
        return None
