"""`SnapshotTiers`: snapshots of states on the device, and those that had to leave it in the host's memory.

A snapshot that is given up for another is copied to the host, where it waits until its prefix is asked for again. It
stays there when it is fetched: nothing changes a snapshot, so that leaving the device once more costs no second copy.
Blocks stay on the device: a snapshot is found, in either memory, as long as the block that it follows is there.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from realizar.batch import NO_MOVES, StateMoves
from realizar.kv_cache.key_changes import KeyLog
from realizar.kv_cache.step_pool import StepPool
from realizar.outputs import SnapshotUse


@dataclass(frozen=True, slots=True)
class SnapshotCounts:
    """Snapshots now, and counts since the start.

    Attributes:
        total, host_total: snapshots that there is memory for, on the device and on the host.
        kept, host_kept: those that can be found. One may be in both memories.
        taken: copies from a row. restored: copies to a row, fetched ones among them.
        dropped: snapshots given up for others, with the block that they follow, or with the whole prefix cache; they
            are in neither memory.
        stored, fetched: copies to the host, and from there to a row.
    """

    total: int = 0
    kept: int = 0
    taken: int = 0
    restored: int = 0
    dropped: int = 0
    host_total: int = 0
    host_kept: int = 0
    stored: int = 0
    fetched: int = 0


class SnapshotTiers:
    """Snapshots by the key of the block that they follow; none in the host's memory without any on the device.

    It gathers the copies of the step that is being scheduled, and what each row's tokens cost and gave meanwhile. `row`
    is that for which something is dropped; None is nobody. `log` notes the keys that snapshots can be found by, in
    either memory.
    """

    def __init__(self, num_snapshots: int, num_host_snapshots: int = 0) -> None:
        self._device = SnapshotPool(num_snapshots)
        self._host = SnapshotPool(num_host_snapshots if num_snapshots else 0)
        self._counts: Counter[str] = Counter()
        self._uses: dict[int, Counter[str]] = defaultdict(Counter)  # by row
        self._moves: dict[str, list[tuple[int, int]]] = defaultdict(list)  # by the fields of `StateMoves`
        self.row: int | None = None
        self.log = KeyLog()

    @property
    def counts(self) -> SnapshotCounts:
        device, host = self._device, self._host
        return SnapshotCounts(
            total=device.num_snapshots, kept=len(device.keys), host_total=host.num_snapshots, host_kept=len(host.keys),
            **self._counts,
        )  # fmt: skip

    @property
    def has_host(self) -> bool:
        return self._host.num_snapshots > 0

    @property
    def keys(self) -> Collection[bytes]:
        return {*self._device.keys, *self._host.keys}

    def find(self, key: bytes) -> int | None:
        return self._device.find(key)

    def find_on_host(self, key: bytes) -> int | None:
        return self._host.find(key)

    def has(self, key: bytes) -> bool:
        return self.find(key) is not None or self.find_on_host(key) is not None

    def restore(self, row: int, key: bytes) -> None:
        """Let a row start from a snapshot in the step that is being scheduled, before any other is taken in it."""
        self._count("restored", row)
        if self._device.find(key) is not None:
            self._moves["restored"].append((row, self._device.use(key)))
            return
        self._count("fetched", row)
        self._moves["fetched"].append((row, self._host.use(key)))

    def keep(self, row: int, key: bytes) -> None:
        """Name memory on the device for what a row fetches, unless it is there or none can be given up.

        All rows of the step have their snapshots by now: what they name is not given up.
        """
        if self._device.find(key) is None:
            self._allocate("kept", row, key, self._host.client_of(key))

    def take(self, row: int, key: bytes, client: str = "") -> None:
        """Name memory for a new snapshot of a row, after whose step it is written and from now on found.

        There is none if there is one with this key on the device, or steps in flight name all of them. What the host
        has already counts as taken.
        """
        is_new = not self.has(key)
        if self._allocate("taken", row, key, client) and is_new:
            self._count("taken", row)
            self.log.note(key, is_there=True)

    def take_moves(self) -> StateMoves:
        """The copies of the step that was scheduled."""
        moves, self._moves = self._moves, defaultdict(list)
        return StateMoves(**{name: tuple(pairs) for name, pairs in moves.items()}) if any(moves.values()) else NO_MOVES

    def take_uses(self) -> dict[int, SnapshotUse]:
        """What rows used since the last call, by row."""
        uses, self._uses = self._uses, defaultdict(Counter)
        return {row: SnapshotUse(**counts) for row, counts in uses.items()}

    def drop(self, key: bytes) -> None:
        """Let the snapshot with this key be found no more; unknown keys pass."""
        if self.has(key):
            self._device.drop(key)
            self._host.drop(key)
            self._lose(key)

    def forget(self) -> None:
        self.row = None
        for key in self.keys:
            self.drop(key)

    def finished(self, moves: StateMoves) -> None:
        """Note that a step with these moves is done, or was given up: their snapshots may be given up."""
        self._device.finished(snapshot for _, snapshot in (*moves.restored, *moves.kept, *moves.taken))
        self._host.finished(snapshot for _, snapshot in (*moves.fetched, *moves.stored))

    def audit(self, has_block: Callable[[bytes], bool]) -> None:
        """Audit both memories, as `SnapshotPool.audit`; nothing that was taken is lost uncounted."""
        for pool in (self._device, self._host):
            pool.audit(has_block)
        taken, found, dropped = self._counts["taken"], len(self.keys), self._counts["dropped"]
        if taken != found + dropped:
            raise RuntimeError(f"{taken} snapshots were taken, {found} are found and {dropped} were dropped")

    def _allocate(self, move: str, row: int, key: bytes, client: str) -> bool:
        """Name memory on the device for a row's state; what it held before may go to the host."""
        self.row = row
        snapshot, given_up = self._device.take(key, client)
        if snapshot is None:
            return False
        self._moves[move].append((row, snapshot))
        if given_up is not None and (host_snapshot := self._store(*given_up)) is not None:
            self._moves["stored"].append((snapshot, host_snapshot))
        return True

    def _store(self, key: bytes, client: str) -> int | None:
        """Name memory of the host for a snapshot that was given up; None if it is there, or has to be dropped."""
        if self._host.find(key) is not None:
            self._host.touch(key)
            return None
        host_snapshot, lost = self._host.take(key, client)
        if lost is not None and self._device.find(lost.key) is None:
            self._lose(lost.key)
        if host_snapshot is None:
            self._lose(key)
        else:
            self._counts["stored"] += 1
        return host_snapshot

    def _lose(self, key: bytes) -> None:
        self._count("dropped", self.row)
        self.log.note(key, is_there=False)

    def _count(self, what: Literal["taken", "restored", "fetched", "dropped"], row: int | None) -> None:
        self._counts[what] += 1
        if row is not None:
            self._uses[row][what] += 1


class GivenUp(NamedTuple):
    """A snapshot that was dropped for another: its key, and the client that it was taken for."""

    key: bytes
    client: str


class _Kept(NamedTuple):
    snapshot: int
    client: str


class SnapshotPool:
    """Hands out snapshot numbers 0 .. num_snapshots - 1 of one memory.

    When none is free, one that no step in flight names is dropped: the least recently used one of a client that has
    more than half of them, or would then, and otherwise of all. So many long prompts of one client leave the others at
    least half, of which nobody has a part for good.
    """

    def __init__(self, num_snapshots: int) -> None:
        self.num_snapshots = num_snapshots
        self._numbers = StepPool(num_snapshots, "snapshot")
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()  # by key, least recently used first

    @property
    def keys(self) -> Collection[bytes]:
        """Keys of kept snapshots, the least recently used first."""
        return self._kept.keys()

    def find(self, key: bytes) -> int | None:
        kept = self._kept.get(key)
        return None if kept is None else kept.snapshot

    def client_of(self, key: bytes) -> str:
        return self._kept[key].client

    def touch(self, key: bytes) -> None:
        self._kept.move_to_end(key)

    def use(self, key: bytes) -> int:
        """Name a kept snapshot in the step that is being scheduled; it becomes the most recently used one."""
        self.touch(key)
        return self._named(self._kept[key].snapshot)

    def take(self, key: bytes, client: str = "") -> tuple[int | None, GivenUp | None]:
        """Name memory for a new snapshot in the step that is being scheduled, from which on it is found.

        None if there is one with this key, or steps in flight name all of them; and the one that was dropped for it.
        """
        if key in self._kept:
            return None, None
        given_up = None
        self._numbers.take_released()
        if not self._numbers.num_free:
            given_up = self._oldest(self._greedy(client)) or self._oldest(None)
            if given_up is None:
                return None, None
            self.drop(given_up.key)
            self._numbers.take_released()
        snapshot = self._named(self._numbers.take())
        self._kept[key] = _Kept(snapshot, client)
        return snapshot, given_up

    def drop(self, key: bytes) -> None:
        """Let the snapshot with this key be found no more; unknown keys pass."""
        if (kept := self._kept.pop(key, None)) is not None:
            self._numbers.release(kept.snapshot)

    def finished(self, snapshots: Iterable[int]) -> None:
        """Note that a step that names these snapshots is done, or was given up."""
        for snapshot in snapshots:
            self._numbers.finished(np.array([snapshot]))

    def audit(self, has_block: Callable[[bytes], bool]) -> None:
        """Prove that kept snapshots have their block, and as `StepPool.audit`. RuntimeError: it is not so."""
        self._numbers.audit(kept.snapshot for kept in self._kept.values())
        if not all(has_block(key) for key in self._kept):
            raise RuntimeError("a snapshot is kept without the block that it follows")

    def _named(self, snapshot: int) -> int:
        self._numbers.submitted(np.array([snapshot]))
        return snapshot

    def _greedy(self, client: str) -> str | None:
        """The client that has more than half of all snapshots, or would with one more for `client`."""
        half = self.num_snapshots / 2
        counts = Counter(kept.client for kept in self._kept.values())
        if counts[client] + 1 > half:
            return client
        return next((other for other, count in counts.most_common(1) if count > half), None)

    def _oldest(self, client: str | None) -> GivenUp | None:
        """The least recently used snapshot of a client, or of all, that no step in flight names."""
        for key, kept in self._kept.items():
            if client in (None, kept.client) and not self._numbers.is_named(kept.snapshot):
                return GivenUp(key, kept.client)
        return None
