"""`HeldKeys`: which blocks one replica's prefix cache holds, as far as its reports say. Standard library only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeyChanges:
    """Keys that a cache holds since the last report, and keys that it holds no more."""

    added: Sequence[bytes] = ()
    removed: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class KeyReport:
    """What changed in a replica's prefix cache since its last report.

    Attributes:
        incarnation: of the replica: another number for every engine that takes its place. What an engine held is gone
            with it.
        number: of the report: 0 for the first of an incarnation, then one more each time.
        blocks: keys of blocks.
        ends: those keys after which a sequence can go on, for a model that needs more than the blocks of full
            attention, such as a snapshot of a state; None where it can go on after any block.
        complete: the report has all that is held, and does not follow from earlier ones.
    """

    incarnation: int
    number: int
    blocks: KeyChanges = KeyChanges()
    ends: KeyChanges | None = None
    complete: bool = False


class HeldKeys:
    """The keys of one replica, reported ones and those that its open requests are expected to bring.

    Args:
        incarnation: of the replica's engine; reports of any other are ignored.
        most_keys: keys that are remembered of each kind; the oldest are forgotten.
        expected_s: seconds for which an expected key counts without a report.
        stale_s: seconds after the last report from which on reported keys do not count; None where a silent replica is
            known to hold what it held.
    """

    def __init__(
        self, incarnation: int = 0, *, most_keys: int = 1 << 20, expected_s: float = 60.0, stale_s: float | None = None
    ) -> None:
        self.incarnation = incarnation
        self._most_keys, self._expected_s, self._stale_s = most_keys, expected_s, stale_s
        self._next_number = 0
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._ends: OrderedDict[bytes, None] | None = None
        self._expected: OrderedDict[bytes, float] = OrderedDict()  # with the time at which each counts no more
        self._heard_s: float | None = None

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def num_expected(self) -> int:
        """Keys that are expected and were not reported yet; some may have expired."""
        return len(self._expected)

    def take(self, report: KeyReport, now_s: float) -> bool:
        """Take a report in.

        Returns:
            False if it was not taken: it is of another incarnation, or one before it is missing. In the latter case
            nothing counts as held any more, and only a complete report helps.
        """
        if report.incarnation != self.incarnation:
            return False
        if report.number != self._next_number and not report.complete:
            self._forget()
            self._next_number = -1
            return False
        if report.complete:
            self._forget()
        self._next_number = report.number + 1
        self._heard_s = now_s
        self._change(self._blocks, report.blocks)
        for key in report.blocks.added:
            self._expected.pop(key, None)
        if report.ends is not None:
            self._ends = OrderedDict() if self._ends is None else self._ends
            self._change(self._ends, report.ends)
        return True

    def expect(self, keys: Iterable[bytes], now_s: float) -> None:
        """Expect the keys of a request that was sent to the replica: it computes what it does not hold."""
        until_s = now_s + self._expected_s
        for key in keys:
            if key not in self._blocks:
                self._expected[key] = until_s
                self._expected.move_to_end(key)
        while self._expected and (
            len(self._expected) > self._most_keys or next(iter(self._expected.values())) <= now_s
        ):
            self._expected.popitem(last=False)

    def num_usable(self, keys: Sequence[bytes], now_s: float) -> int:
        """The number of blocks, from the first on, after which a sequence with these keys can go on at the replica."""
        is_stale = self._stale_s is not None and (self._heard_s is None or now_s - self._heard_s > self._stale_s)
        blocks: OrderedDict[bytes, None] = OrderedDict() if is_stale else self._blocks
        ends, usable = self._ends, 0
        for place, key in enumerate(keys, 1):
            if key in blocks:
                usable = place if ends is None or key in ends else usable
            elif self._expected.get(key, now_s) > now_s:
                usable = place
            else:
                break
        return usable

    def _change(self, held: OrderedDict[bytes, None], changes: KeyChanges) -> None:
        for key in changes.removed:
            held.pop(key, None)
        for key in changes.added:
            held[key] = None
            held.move_to_end(key)
        while len(held) > self._most_keys:
            held.popitem(last=False)

    def _forget(self) -> None:
        self._blocks.clear()
        self._ends = None
