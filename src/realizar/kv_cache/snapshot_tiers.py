"""`SnapshotTiers`: snapshots of states on the device, and those that had to leave it in the host's memory.

A snapshot that is given up for another is copied to the host, where it waits until its prefix is asked for again. It
stays there when it is fetched: nothing changes a snapshot, so that leaving the device once more costs no second copy.
Blocks stay on the device: a snapshot is found, in either memory, as long as the block that it follows is there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from realizar.kv_cache.key_changes import KeyLog
from realizar.kv_cache.snapshots import SnapshotPool
from realizar.state_moves import StateMoves


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


class Taken(NamedTuple):
    """A snapshot to be written.

    `stored` is the host snapshot to which what it held before is copied; None where nothing is. `is_new` is False if
    the host's memory has the same one, which counts as taken already.
    """

    snapshot: int
    stored: int | None = None
    is_new: bool = True


class SnapshotTiers:
    """Snapshots by the key of the block that they follow; none in the host's memory without any on the device.

    `log` notes the keys that snapshots can be found by, in either memory; None notes none.
    """

    def __init__(self, num_snapshots: int, num_host_snapshots: int = 0) -> None:
        self._device = SnapshotPool(num_snapshots)
        self._host = SnapshotPool(num_host_snapshots if num_snapshots else 0)
        self._taken = self._restored = self._dropped = self._stored = self._fetched = 0
        self.log: KeyLog | None = None

    @property
    def counts(self) -> SnapshotCounts:
        return SnapshotCounts(
            self._device.num_snapshots, self._device.num_kept, self._taken, self._restored, self._dropped,
            self._host.num_snapshots, self._host.num_kept, self._stored, self._fetched,
        )  # fmt: skip

    @property
    def num_dropped(self) -> int:
        return self._dropped

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

    def restore(self, snapshot: int) -> None:
        self._device.use(snapshot)
        self._restored += 1

    def fetch(self, host_snapshot: int) -> None:
        self._host.use(host_snapshot)
        self._restored += 1
        self._fetched += 1

    def take(self, key: bytes, client: str = "") -> Taken | None:
        """Name memory for a new snapshot of a client in the step that is being scheduled, from which on it is found.

        It returns None if there is one with this key on the device, or steps in flight name all of them.
        """
        is_new = not self.has(key)
        taken = self._take(key, client)
        if taken is None:
            return None
        if not is_new:
            return taken._replace(is_new=False)
        self._taken += 1
        if self.log is not None:
            self.log.add(key)
        return taken

    def keep(self, host_snapshot: int) -> Taken | None:
        """Name memory on the device for a snapshot that is fetched in the step that is being scheduled.

        It returns None if it is there already, or none can be given up.
        """
        return self._take(self._host.key_of(host_snapshot), self._host.client_of(host_snapshot))

    def drop(self, key: bytes) -> None:
        """Let the snapshot with this key be found no more; unknown keys pass."""
        if self.has(key):
            self._device.drop(key)
            self._host.drop(key)
            self._lost(key)

    def forget(self) -> None:
        for key in self.keys:
            self.drop(key)

    def finished(self, moves: StateMoves) -> None:
        self._device.finished(snapshot for _, snapshot in (*moves.restored, *moves.kept, *moves.taken))
        self._host.finished(snapshot for _, snapshot in moves.fetched)
        self._host.finished(snapshot for _, snapshot in moves.stored)

    def audit(self, has_block: Callable[[bytes], bool]) -> None:
        """Audit both memories, as `SnapshotPool.audit`; nothing that was taken is lost uncounted."""
        for pool in (self._device, self._host):
            pool.audit(has_block)
        found = len(self.keys)
        if self._taken != found + self._dropped:
            raise RuntimeError(
                f"{self._taken} snapshots were taken, {found} are found and {self._dropped} were dropped"
            )

    def _take(self, key: bytes, client: str) -> Taken | None:
        if self._device.find(key) is not None:
            return None
        given_up = self._device.make_room(client)
        snapshot = self._device.take(key, client)
        if snapshot is None:
            return None
        if given_up is None:
            return Taken(snapshot)
        return Taken(snapshot, self._store(*given_up))

    def _store(self, key: bytes, client: str) -> int | None:
        """Name memory of the host for a snapshot that was given up; None if it is there, or has to be dropped."""
        if (there := self._host.find(key)) is not None:
            self._host.touch(there)
            return None
        lost = self._host.make_room(client)
        if lost is not None and self._device.find(lost.key) is None:
            self._lost(lost.key)
        host_snapshot = self._host.take(key, client)
        if host_snapshot is None:
            self._lost(key)
        else:
            self._stored += 1
        return host_snapshot

    def _lost(self, key: bytes) -> None:
        self._dropped += 1
        if self.log is not None:
            self.log.drop(key)
