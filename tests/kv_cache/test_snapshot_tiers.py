"""Snapshots in two memories: what leaves the device waits on the host, and is found there while its block is."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_cache.test_snapshots import TOKENS, compute, everything, manager
from realizar.batch import StateMoves
from realizar.kv_cache.block_keys import BlockKeys
from realizar.kv_cache.snapshot_tiers import SnapshotCounts, SnapshotTiers
from realizar.outputs import SnapshotUse


def take(tiers: SnapshotTiers, key: bytes, client: str = "") -> StateMoves:
    """The copies of a step that takes a snapshot and is done."""
    tiers.take(0, key, client)
    return done(tiers)


def done(tiers: SnapshotTiers) -> StateMoves:
    """The copies of a step that is done."""
    moves = tiers.take_moves()
    tiers.finished(moves)
    return moves


def test_what_leaves_the_device_goes_to_the_host() -> None:
    tiers = SnapshotTiers(1, 2)
    assert take(tiers, b"a") == StateMoves(taken=((0, 0),))
    assert take(tiers, b"b") == StateMoves(taken=((0, 0),), stored=((0, 0),))
    assert take(tiers, b"c") == StateMoves(taken=((0, 0),), stored=((0, 1),))
    assert [tiers.device.find(key) for key in (b"a", b"b", b"c")] == [None, None, 0]
    assert [tiers.host.find(key) for key in (b"a", b"b", b"c")] == [0, 1, None]
    assert take(tiers, b"d").stored == ((0, 0),)  # the oldest leaves the host for good
    assert not tiers.has(b"a")
    assert tiers.counts == SnapshotCounts(1, 1, 4, 0, 1, 2, 2, 3, 0)
    assert tiers.take_uses() == {0: SnapshotUse(taken=4, dropped=1)}
    tiers.audit(everything)


def test_a_fetched_snapshot_stays_on_the_host() -> None:
    """So that it leaves the device a second time without a copy."""
    tiers = SnapshotTiers(1, 2)
    take(tiers, b"a")
    take(tiers, b"b")
    tiers.take_uses()
    tiers.restore(3, b"a")
    tiers.restore(4, b"a")
    tiers.keep(3, b"a")
    tiers.keep(4, b"a")
    assert done(tiers) == StateMoves(fetched=((3, 0), (4, 0)), kept=((3, 0),), stored=((0, 1),))
    assert tiers.take_uses() == {row: SnapshotUse(restored=1, fetched=1) for row in (3, 4)}
    assert [(tiers.device.find(key), tiers.host.find(key)) for key in (b"a", b"b")] == [(0, 0), (None, 1)]
    assert take(tiers, b"c") == StateMoves(taken=((0, 0),))
    assert tiers.host.find(b"a") == 0
    counts = tiers.counts
    assert (counts.taken, counts.restored, counts.fetched, counts.stored, counts.dropped) == (3, 2, 2, 2, 0)


def test_a_host_snapshot_that_a_step_names_is_not_given_up() -> None:
    tiers = SnapshotTiers(1, 1)
    take(tiers, b"a")
    take(tiers, b"b")
    tiers.restore(0, b"a")
    fetching = tiers.take_moves()
    assert fetching == StateMoves(fetched=((0, 0),))
    assert take(tiers, b"c") == StateMoves(taken=((0, 0),))  # b has no place and is dropped
    assert (tiers.has(b"a"), tiers.has(b"b"), tiers.counts.dropped) == (True, False, 1)
    tiers.finished(fetching)
    assert take(tiers, b"d").stored == ((0, 0),)


def test_a_snapshot_that_is_dropped_or_forgotten_is_in_neither_memory() -> None:
    tiers = SnapshotTiers(2, 2)
    for key in (b"a", b"b", b"c", b"d"):
        take(tiers, key)
    tiers.drop(b"a")
    tiers.drop(b"d")
    tiers.drop(b"e")
    assert [tiers.has(key) for key in (b"a", b"b", b"c", b"d")] == [False, True, True, False]
    tiers.forget()
    assert tiers.counts.dropped == 4
    assert (tiers.counts.kept, tiers.counts.host_kept) == (0, 0)
    tiers.audit(everything)


def test_without_memory_on_the_device_there_is_none_on_the_host() -> None:
    assert SnapshotTiers(0, 4).host.num_blocks == 0


@pytest.mark.parametrize("fault", ["device", "host", "count", "client"])
def test_the_audit_finds(fault: str) -> None:
    tiers = SnapshotTiers(1, 1)
    take(tiers, b"a")
    take(tiers, b"b")
    if fault == "count":
        tiers._counts["dropped"] += 1
    elif fault == "client":
        tiers._clients.clear()
    with pytest.raises(RuntimeError, match="snapshot"):
        tiers.audit(lambda key: (key, fault) not in ((b"b", "device"), (b"a", "host")))


class Tiers(RuleBasedStateMachine):
    """Both memories beside what each snapshot must hold, with steps that end in the order in which they began.

    A step's copies are made in the order of `StateMoves`, when it is submitted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tiers = SnapshotTiers(3, 4)
        self.device: dict[int, int] = {}
        self.host: dict[int, int] = {}
        self.steps: list[StateMoves] = []
        self.unnamed: list[tuple[int, int]] = []  # what a snapshot must hold, and the snapshot
        self.begin()

    def begin(self) -> None:
        self.rows: list[int] = []  # what the state of each row of the step is
        self.may_start = True

    @precondition(lambda self: self.may_start)
    @rule(number=st.integers(0, 9))
    def start(self, number: int) -> None:
        """A row starts from a snapshot, if there is one."""
        if self.tiers.has(bytes([number])):
            self.tiers.restore(len(self.rows), bytes([number]))
            self.rows.append(number)

    @precondition(lambda self: self.may_start)
    @rule()
    def keep(self) -> None:
        for row, number in enumerate(self.rows):
            if self.tiers.has(bytes([number])):  # else it was dropped since
                self.tiers.keep(row, bytes([number]))
        self.may_start = False

    @rule(number=st.integers(0, 9), client=st.sampled_from(["a", "b"]))
    def take(self, number: int, client: str) -> None:
        self.tiers.take(100 + number, bytes([number]), client)
        self.may_start = False

    @rule(number=st.integers(0, 9), is_named=st.booleans(), only_weak=st.booleans())
    def take_unnamed(self, number: int, is_named: bool, only_weak: bool) -> None:
        """The first that waits has a key later, or is given back."""
        snapshot = self.tiers.take_unnamed(100 + number, only_weak=only_weak)
        if snapshot is not None:
            self.unnamed.append((number, snapshot))
        elif self.unnamed:
            held, given = self.unnamed.pop(0)
            if is_named:
                self.tiers.name(100 + held, given, bytes([held]), "a", "end")
            else:
                self.tiers.give_back(given)
        self.may_start = False

    @rule(number=st.integers(0, 9))
    def weaken(self, number: int) -> None:
        self.tiers.weaken(bytes([number]))

    @rule(number=st.integers(0, 9))
    def drop(self, number: int) -> None:
        self.tiers.drop(bytes([number]))
        assert not self.tiers.has(bytes([number]))

    @rule()
    def submit(self) -> None:
        moves = self.tiers.take_moves()
        for snapshot, host_snapshot in moves.stored:
            self.host[host_snapshot] = self.device[snapshot]
        for row, host_snapshot in moves.fetched:
            assert self.host[host_snapshot] == self.rows[row]
        for row, snapshot in moves.restored:
            assert self.device[snapshot] == self.rows[row]
        for row, snapshot in moves.kept:
            self.device[snapshot] = self.rows[row]
        for row, snapshot in moves.taken:
            self.device[snapshot] = row - 100
        self.steps.append(moves)
        self.begin()

    @precondition(lambda self: self.steps)
    @rule()
    def finish(self) -> None:
        self.tiers.finished(self.steps.pop(0))

    @rule()
    def forget(self) -> None:
        self.tiers.forget()

    @invariant()
    def adds_up(self) -> None:
        self.tiers.audit(everything)


TestTiers = Tiers.TestCase
TestTiers.settings = settings(max_examples=60, stateful_step_count=40)


def test_weak_snapshots_are_given_up_first_and_not_moved() -> None:
    tiers = SnapshotTiers(3, 2)
    for key in (b"a", b"b", b"c"):
        take(tiers, key)
    tiers.weaken(b"b")
    assert tiers.take_unnamed(0, only_weak=True) is not None
    assert not tiers.has(b"b")
    assert tiers.take_moves().stored == ()
    assert tiers.take_unnamed(0, only_weak=True) is None
    assert tiers.take_unnamed(0) is not None
    assert tiers.host.keys == {b"a"}
    tiers.weaken(b"c")
    tiers.restore(0, b"c")  # and is not weak any more
    tiers.finished(tiers.take_moves())
    assert tiers.take_unnamed(0, only_weak=True) is None


def test_an_unnamed_snapshot_is_found_once_it_has_a_key() -> None:
    tiers = SnapshotTiers(2)
    snapshots = [tiers.take_unnamed(0), tiers.take_unnamed(0)]
    tiers.finished(tiers.take_moves())
    assert tiers.take_unnamed(0) is None, "nobody else may write there"
    assert tiers.counts.taken == 0
    for snapshot in snapshots:
        assert snapshot is not None
        tiers.name(0, snapshot, b"a", "", "end")
    assert tiers.place(b"a") == "end"
    assert (tiers.counts.kept, tiers.counts.taken) == (1, 1), "two of one block are one"
    assert tiers.device.counts.free == 1
    tiers.audit(everything)


def test_a_prefix_ends_where_a_snapshot_on_the_host_saves_enough() -> None:
    """One that saves less is computed past, from the last snapshot on the device."""
    cache, keys = (
        manager(num_blocks=40, num_snapshots=1, num_host_snapshots=4),
        BlockKeys(4, None),
    )
    cache.least_fetched_tokens = 9
    compute(cache, keys, 40, (8, 20, 32))  # 8 and 20 leave the device
    assert (cache.snapshots.counts.kept, cache.snapshots.counts.host_kept) == (1, 2)
    for most, wanted, on_host in ((40, 32, False), (31, 20, True), (20, 20, True), (19, 0, None), (7, 0, None)):
        prefix = cache.find_prefix(keys, TOKENS, most)
        assert (prefix.num_tokens, prefix.num_matched_tokens) == (wanted, most // 4 * 4)
        assert (prefix.snapshot is None) is (on_host is None)
        if prefix.snapshot is not None:
            assert (cache.snapshots.device.find(prefix.snapshot) is None) is on_host
    cache.audit()


def test_who_asks_for_the_same_by_other_means_finds_the_snapshots_on_the_host() -> None:
    """So files are not read for what is in the host's memory."""
    cache, keys = manager(num_blocks=40, num_snapshots=1, num_host_snapshots=4), BlockKeys(4, None)
    compute(cache, keys, 40, (8, 20, 32))
    for most in (40, 31, 20, 19, 7):
        known = keys.of(TOKENS)[: most // 4]
        matched, end = cache.usable(known, [partial(cache.has, part) for part in (0, 1)])
        assert (4 * matched, 4 * end) == (most // 4 * 4, cache.find_prefix(keys, TOKENS, most).num_tokens)


def test_a_block_that_is_given_up_takes_its_snapshot_on_the_host_along() -> None:
    cache, keys = manager(num_blocks=8, num_snapshots=1, num_host_snapshots=4), BlockKeys(4, None)
    compute(cache, keys, 28, (20, 8))
    assert cache.snapshots.counts.host_kept == 1
    cache.allocate(1, 0, 16)
    cache.audit()
    counts = cache.snapshots.counts
    assert counts.kept + counts.host_kept == 1
    assert counts.dropped == 1
