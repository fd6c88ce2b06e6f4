"""`PrefixRouter` chooses the replica of a request: by the prefix that it holds, and by load. Standard library only.

The cost of a request at a replica is counted in prompt tokens:

    cost = PREFIX_WEIGHT * (prompt tokens that it would compute)
           + prompt tokens that its other requests still wait for
           + CHOICE_TOKENS * (choices that it has open)

and the cheapest replica gets it. The first term is the work that all replicas together are spared by a cached prefix,
the others are the time that the request waits. So a family of requests with one prefix stays together as long as its
replica is at most `PREFIX_WEIGHT * prefix` behind the least loaded one. Beyond that a second replica computes the
prefix too, and from then on load alone decides between them: a hot family is copied as often as it needs, a short
prefix sooner than a long one. A weight above 1 is there because a copy costs everybody, and waiting only the request.

A request that was sent counts at once: its keys are expected of its replica before any report, and its tokens are part
of the load. So requests of a family that come together stay together.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

PREFIX_WEIGHT = 3.0
"""How much dearer a prompt token is that has to be computed than one that is waited for."""
CHOICE_TOKENS = 128
"""Prompt tokens that take about as long as one open choice delays the others."""
MOST_KEYS = 1 << 20
"""Keys that are remembered of each kind; the oldest are forgotten."""
EXPECTED_S = 60.0
"""Seconds for which an expected key counts without a report."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The work that a replica has: choices that have not ended, and prompt tokens that its requests wait for.

    These are of prompts whose first token has not come, less what was found in the cache.
    """

    pending_tokens: int = 0
    num_open: int = 0


@dataclass(frozen=True, slots=True)
class Route:
    """A replica, and the prompt tokens that it is thought to hold."""

    replica: str
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class KeyChanges:
    added: Sequence[bytes] = ()
    removed: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class KeyReport:
    """What changed in a replica's prefix cache since its last report.

    Attributes:
        incarnation: of the replica: another number for every engine that takes its place. What an engine held is gone
            with it.
        number: of the report: 0 for the first of an incarnation, then one more each time.
        ends: keys after which a sequence can go on, for a model that needs more than the blocks of full attention, such
            as a snapshot of a state; None where it can go on after any block.
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

    Attributes:
        blocks: reported keys, the oldest first.
        ends: those of them after which a sequence may go on; None where it may after any.
    """

    def __init__(self, incarnation: int = 0) -> None:
        self.incarnation = incarnation
        self._next_number = 0
        self.blocks: OrderedDict[bytes, None] = OrderedDict()
        self.ends: OrderedDict[bytes, None] | None = None
        self._expected: OrderedDict[bytes, float] = OrderedDict()  # with the time at which each counts no more

    def __len__(self) -> int:
        return len(self.blocks)

    def take(self, report: KeyReport) -> bool:
        """Take a report in; False if it is of another incarnation, or one before it is missing.

        In the latter case nothing counts as held any more, and only a complete report helps.
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
        self._change(self.blocks, report.blocks)
        for key in report.blocks.added:
            self._expected.pop(key, None)
        if report.ends is not None:
            self.ends = OrderedDict() if self.ends is None else self.ends
            self._change(self.ends, report.ends)
        return True

    def expect(self, keys: Iterable[bytes], now_s: float) -> None:
        """Expect the keys of a request that was sent to the replica: it computes what it does not hold."""
        until_s = now_s + EXPECTED_S
        for key in keys:
            if key not in self.blocks:
                self._expected[key] = until_s
                self._expected.move_to_end(key)
        while self._expected and (len(self._expected) > MOST_KEYS or next(iter(self._expected.values())) <= now_s):
            self._expected.popitem(last=False)

    def num_usable(self, keys: Sequence[bytes], now_s: float) -> int:
        """The number of blocks, from the first on, after which a sequence with these keys can go on at the replica."""
        blocks, ends, usable = self.blocks, self.ends, 0
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
        while len(held) > MOST_KEYS:
            held.popitem(last=False)

    def _forget(self) -> None:
        self.blocks.clear()
        self.ends = None


class PrefixRouter:
    """Knows which keys each replica holds. It is no owner of replicas: who is ready is the caller's to know.

    The keys of a prompt are those of its full blocks, in order; a key is made from all tokens before its block's end,
    and from all else that keeps requests apart, such as a salt. So keys alone decide what may be shared. `clock` gives
    seconds, monotonic.
    """

    def __init__(self, block_tokens: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._block_tokens, self._clock = block_tokens, clock
        self._held: dict[str, HeldKeys] = {}
        self._turns = itertools.count(1)
        self._last_turn: dict[str, int] = {}

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(self._held)

    def num_keys(self, replica: str) -> int:
        held = self._held.get(replica)
        return 0 if held is None else len(held)

    def begin(self, replica: str, incarnation: int) -> None:
        """Note a replica's new engine, which holds nothing. Nothing changes if this incarnation has begun already."""
        held = self._held.get(replica)
        if held is None or held.incarnation != incarnation:
            self._held[replica] = HeldKeys(incarnation)

    def leave(self, replica: str) -> None:
        """Forget a replica, whose engine is gone; an unknown one passes."""
        self._held.pop(replica, None)
        self._last_turn.pop(replica, None)

    def report(self, replica: str, report: KeyReport) -> bool:
        """Take a replica's report in; see `HeldKeys.take`. That of a replica that has not begun is not taken."""
        held = self._held.get(replica)
        return held is not None and held.take(report)

    def num_cached_tokens(self, replica: str, keys: Sequence[bytes]) -> int:
        """Tokens of a prompt with these keys that a replica holds, or is expected to."""
        held = self._held.get(replica)
        return 0 if held is None else held.num_usable(keys, self._clock()) * self._block_tokens

    def choose(self, keys: Sequence[bytes], num_tokens: int, loads: Mapping[str, ReplicaLoad]) -> Route | None:
        """Choose the replica of a request among `loads`, those ready and not draining, and note nothing.

        Of replicas that cost the same, the one with the fewest open choices is taken; then one that the prompt's first
        key decides, so that routers that do not know of each other agree; without keys the one that waited longest.
        """
        cached = {name: min(self.num_cached_tokens(name, keys), num_tokens) for name in loads}
        first = keys[0] if keys else None

        def rank(name: str) -> tuple[float, int, bytes | int, str]:
            load = loads[name]
            cost = PREFIX_WEIGHT * (num_tokens - cached[name]) + load.pending_tokens + CHOICE_TOKENS * load.num_open
            turn = self._last_turn.get(name, 0) if first is None else _score(first, name)
            return cost, load.num_open, turn, name

        chosen = min(loads, key=rank, default=None)
        return None if chosen is None else Route(chosen, cached[chosen])

    def placed(self, replica: str, keys: Sequence[bytes]) -> None:
        """Note that a request was sent to a replica, which holds these keys soon."""
        held = self._held.get(replica)
        if held is not None:
            held.expect(keys, self._clock())
            self._last_turn[replica] = next(self._turns)


def _score(key: bytes, replica: str) -> bytes:
    """A rank of a replica for a key, the same everywhere (rendezvous hashing)."""
    return hashlib.blake2b(key + replica.encode(), digest_size=8).digest()
