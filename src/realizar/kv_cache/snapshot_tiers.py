"""`SnapshotTiers`: snapshots of states on the device, and those that had to leave it in the host's memory.

A snapshot that is given up for another is copied to the host, where it waits until its prefix is asked for again. It
stays there when it is fetched: nothing changes a snapshot, so that leaving the device once more costs no second copy.
Blocks stay on the device: a snapshot is found, in either memory, as long as the block that it follows is there.

A turn of a conversation may leave several, of which the next one needs one: at the end of the prompt, before the
answer's first call, and at its end. At most one is not weak: weak ones are given up before all others, and not moved.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from realizar.batch import NO_MOVES, StateMoves
from realizar.kv_cache.block_keys import KeyLog
from realizar.kv_cache.block_pool import BlockPool
from realizar.outputs import SnapshotUse

Place = Literal["prompt", "call", "end"]
"""Of a turn, where a snapshot was taken."""


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
    either memory; `device` and `host` are the two.
    """

    def __init__(self, num_snapshots: int, num_host_snapshots: int = 0) -> None:
        self._clients: dict[bytes, str] = {}  # for whom each was taken
        self._places: dict[bytes, Place] = {}  # of those that were taken at places of turns
        self.device = SnapshotPool(num_snapshots, self._clients)
        self.host = SnapshotPool(num_host_snapshots if num_snapshots else 0, self._clients)
        self._counts: Counter[str] = Counter()
        self._uses: dict[int, Counter[str]] = defaultdict(Counter)  # by row
        self._moves: dict[str, list[tuple[int, int]]] = defaultdict(list)  # by the fields of `StateMoves`
        self.row: int | None = None
        self.log = KeyLog()

    @property
    def counts(self) -> SnapshotCounts:
        device, host = self.device, self.host
        return SnapshotCounts(
            total=device.num_blocks, kept=len(device.keys), host_total=host.num_blocks, host_kept=len(host.keys),
            **self._counts,
        )  # fmt: skip

    @property
    def keys(self) -> Collection[bytes]:
        return {*self.device.keys, *self.host.keys}

    def has(self, key: bytes) -> bool:
        return self.device.has(key) or self.host.has(key)

    def place(self, key: bytes | None) -> Place | None:
        """Where in its turn a snapshot was taken; None for others."""
        return None if key is None else self._places.get(key)

    def weaken(self, key: bytes) -> None:
        """Give a snapshot up before others, until it is restored; unknown keys pass."""
        self.device.weaken(key)

    def restore(self, row: int, key: bytes) -> None:
        """Let a row start from a snapshot in the step that is being scheduled, before any other is taken in it."""
        self._count("restored", row)
        if (snapshot := self.device.use(key)) is not None:
            self._moves["restored"].append((row, snapshot))
        elif (snapshot := self.host.use(key)) is not None:
            self._count("fetched", row)
            self._moves["fetched"].append((row, snapshot))

    def keep(self, row: int, key: bytes) -> None:
        """Name memory on the device for what a row fetches, unless it is there or none can be given up; after all rows
        of the step have been restored, so that what they name is not given up.
        """
        if not self.device.has(key):
            self._allocate("kept", row, key, self._clients[key])

    def take(self, row: int, key: bytes, client: str = "", place: Place | None = None) -> None:
        """Name memory for a new snapshot of a row, written after the step and found from now on.

        There is none if one with this key is on the device, or steps in flight name all. What the host has is not new.
        """
        is_new = not self.has(key)
        if self._allocate("taken", row, key, client) is not None and is_new:
            self._note_new(row, key, place)

    def take_unnamed(self, row: int, client: str = "", *, only_weak: bool = False) -> int | None:
        """Name memory for a new snapshot of a row, written after the step, whose tokens are not all known yet.

        It is found once `name` says what it follows; until then, or until `give_back`, its memory is no other's. None:
        all memory is in use, or has snapshots that may not be given up for it, with `only_weak` all that are not weak.
        """
        snapshot = self._allocate("taken", row, None, client, only_weak=only_weak)
        if snapshot is not None:
            self.device.share([snapshot])
        return snapshot

    def name(self, row: int, snapshot: int, key: bytes, client: str, place: Place) -> None:
        """Let a snapshot that was taken unnamed be found from now on, unless one with this key is on the device."""
        if not self.device.has(key):
            if not self.has(key):
                self._note_new(row, key, place)
            self._clients[key] = client
            self.device.register(snapshot, key)
        self.give_back(snapshot)

    def give_back(self, snapshot: int) -> None:
        self.device.free([snapshot])

    def put(self, key: bytes, client: str = "") -> int | None:
        """Name memory on the device for a snapshot of a client that is written before the next step, and found then.

        None if there is one with this key in either memory, or steps in flight name all.
        """
        if self.has(key):
            return None
        self.row = None
        snapshot, given_up = self.device.take(key, client)
        if given_up is not None and not self.host.has(given_up):
            self._lose(given_up)
        if snapshot is None:
            return None
        self._count("taken", None)
        self.log.note(key, is_there=True)
        self.device.free([snapshot])
        return snapshot

    def take_moves(self) -> StateMoves:
        """The copies of the step that was scheduled."""
        moves, self._moves = self._moves, defaultdict(list)
        return StateMoves(**{name: tuple(pairs) for name, pairs in moves.items()}) if any(moves.values()) else NO_MOVES

    def take_uses(self) -> dict[int, SnapshotUse]:
        """What rows used since the last call, by row."""
        uses = {row: SnapshotUse(**counts) for row, counts in self._uses.items()}
        self._uses.clear()
        return uses

    def drop(self, key: bytes) -> None:
        """Let the snapshot with this key be found no more; unknown keys pass."""
        if self.has(key):
            self.device.drop(key)
            self.host.drop(key)
            self._lose(key)

    def forget(self) -> None:
        self.row = None
        for key in self.keys:
            self.drop(key)

    def finished(self, moves: StateMoves) -> None:
        """Note that a step with these moves is done, or was given up."""
        self.device.free(snapshot for _, snapshot in (*moves.restored, *moves.kept, *moves.taken))
        self.host.free(snapshot for _, snapshot in (*moves.fetched, *moves.stored))

    def audit(self, has_block: Callable[[bytes], bool]) -> None:
        """Audit both memories; each snapshot has its block, and nothing that was taken is lost uncounted."""
        self.device.audit()
        self.host.audit()
        if self._clients.keys() != self.keys:
            raise RuntimeError("a snapshot has no client, or a client none")
        if not all(map(has_block, self.keys)):
            raise RuntimeError("a snapshot is kept without the block that it follows")
        taken, found, dropped = self._counts["taken"], len(self.keys), self._counts["dropped"]
        if taken != found + dropped:
            raise RuntimeError(f"{taken} snapshots were taken, {found} are found and {dropped} were dropped")

    def _allocate(self, move: str, row: int, key: bytes | None, client: str, *, only_weak: bool = False) -> int | None:
        """Name memory on the device for a row's state; what it held before may go to the host."""
        self.row = row
        num_weak = self.device.num_weak
        snapshot, given_up = self.device.take(key, client, only_weak=only_weak)
        if snapshot is None:
            return None
        self._moves[move].append((row, snapshot))
        if given_up is not None and self.device.num_weak < num_weak:
            if not self.host.has(given_up):
                self._lose(given_up)
        elif given_up is not None and (host_snapshot := self._store(given_up)) is not None:
            self._moves["stored"].append((snapshot, host_snapshot))
        return snapshot

    def _store(self, key: bytes) -> int | None:
        """Name memory of the host for a snapshot that was given up; None if it is there, or has to be dropped."""
        if (known := self.host.use(key)) is not None:
            self.host.free([known])  # it is the most recently used one now
            return None
        host_snapshot, lost = self.host.take(key, self._clients[key])
        if lost is not None and not self.device.has(lost):
            self._lose(lost)
        if host_snapshot is None:
            self._lose(key)
        else:
            self._counts["stored"] += 1
        return host_snapshot

    def _note_new(self, row: int, key: bytes, place: Place | None) -> None:
        self._count("taken", row)
        self.log.note(key, is_there=True)
        if place is not None:
            self._places[key] = place

    def _lose(self, key: bytes) -> None:
        del self._clients[key]
        self._places.pop(key, None)
        self._count("dropped", self.row)
        self.log.note(key, is_there=False)

    def _count(self, what: Literal["taken", "restored", "fetched", "dropped"], row: int | None) -> None:
        self._counts[what] += 1
        if row is not None:
            self._uses[row][what] += 1


class SnapshotPool(BlockPool):
    """Snapshots of one memory. Each step in flight that names one has a reference to it, and who took it unnamed.

    When none is free, one without a reference is dropped: a weak one, or the least recently used one of a client that
    has more than half of them, or would then, and otherwise of all. So many long prompts of one client leave the others
    at least half, of which nobody has a part for good. `clients` has for whom those of all memories were taken, by key.
    """

    def __init__(self, num_snapshots: int, clients: dict[bytes, str]) -> None:
        super().__init__(num_snapshots, kind="snapshot")
        self._clients = clients
        self._weak: dict[bytes, None] = {}  # the first one is given up first

    @property
    def num_weak(self) -> int:
        return len(self._weak)

    def weaken(self, key: bytes) -> None:
        if self.has(key):
            self._weak[key] = None

    def drop(self, key: bytes) -> None:
        self._weak.pop(key, None)
        super().drop(key)

    def use(self, key: bytes) -> int | None:
        """Name a snapshot in the step that is being scheduled; None if there is none with this key."""
        snapshot = self.find(key)
        if snapshot is not None:
            self._weak.pop(key, None)
            self.share([snapshot])
        return snapshot

    def take(self, key: bytes | None, client: str = "", *, only_weak: bool = False) -> tuple[int | None, bytes | None]:
        """Name memory for a new snapshot in the step that is being scheduled, found from then on if it has a key.

        None if there is one with this key, or none may be dropped for it; and the key of the one that was.
        """
        if key is not None and self.has(key):
            return None, None
        given_up = None
        if not self.counts.free:
            given_up = next((each for each in self._weak if not self.ref_count(self._blocks[each])), None)
            if given_up is None and not only_weak:
                given_up = self._oldest(self._greedy(client)) or self._oldest(None)
            if given_up is None:
                return None, None
            self.drop(given_up)
        (snapshot,) = self.allocate(1)
        if key is not None:
            self.register(snapshot, key)
            self._clients[key] = client
        return snapshot, given_up

    def _greedy(self, client: str) -> str | None:
        """The client that has more than half of all snapshots, or would with one more for `client`."""
        half = self.num_blocks / 2
        counts = Counter(self._clients[key] for key in self.keys)
        if counts[client] + 1 > half:
            return client
        return next((other for other, count in counts.most_common(1) if count > half), None)

    def _oldest(self, client: str | None) -> bytes | None:
        """The least recently used snapshot of a client, or of all, without a reference."""
        return next((key for key in self.cached_keys() if client in (None, self._clients[key])), None)
