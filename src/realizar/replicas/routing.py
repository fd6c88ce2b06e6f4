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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from realizar.replicas.held_keys import HeldKeys, KeyReport

PREFIX_WEIGHT = 3.0
"""How much dearer a prompt token is that has to be computed than one that is waited for."""
CHOICE_TOKENS = 128
"""Prompt tokens that take about as long as one open choice delays the others."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The work that a replica has.

    Attributes:
        pending_tokens: prompt tokens that its requests wait for: those of prompts whose first token has not come, less
            what was found in the cache.
        num_open: choices that have not ended.
    """

    pending_tokens: int = 0
    num_open: int = 0


@dataclass(frozen=True, slots=True)
class Route:
    """A replica, and the prompt tokens that it is thought to hold."""

    replica: str
    num_cached_tokens: int


class PrefixRouter:
    """Knows which keys each replica holds. It is no owner of replicas: who is ready is the caller's to know.

    The keys of a prompt are those of its full blocks, in order; a key is made from all tokens before its block's end,
    and from all else that keeps requests apart, such as a salt. So keys alone decide what may be shared.

    Args:
        block_tokens: tokens of a block.
        most_keys, expected_s, stale_s: as in `HeldKeys`.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        block_tokens: int,
        *,
        most_keys: int = 1 << 20,
        expected_s: float = 60.0,
        stale_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._block_tokens, self._clock = block_tokens, clock
        self._most_keys, self._expected_s, self._stale_s = most_keys, expected_s, stale_s
        self._held: dict[str, HeldKeys] = {}
        self._turns = itertools.count(1)
        self._last_turn: dict[str, int] = {}

    @property
    def replicas(self) -> tuple[str, ...]:
        """The replicas that have begun and not left."""
        return tuple(self._held)

    def num_keys(self, replica: str) -> int:
        """Keys that a replica is known to hold."""
        held = self._held.get(replica)
        return 0 if held is None else len(held)

    def begin(self, replica: str, incarnation: int) -> None:
        """Note a replica's new engine, which holds nothing. Nothing changes if this incarnation has begun already."""
        held = self._held.get(replica)
        if held is None or held.incarnation != incarnation:
            self._held[replica] = HeldKeys(
                incarnation, most_keys=self._most_keys, expected_s=self._expected_s, stale_s=self._stale_s
            )

    def leave(self, replica: str) -> None:
        """Forget a replica, whose engine is gone; an unknown one passes."""
        self._held.pop(replica, None)
        self._last_turn.pop(replica, None)

    def report(self, replica: str, report: KeyReport) -> bool:
        """Take a replica's report in; see `HeldKeys.take`. That of a replica that has not begun is not taken."""
        held = self._held.get(replica)
        return held is not None and held.take(report, self._clock())

    def num_cached_tokens(self, replica: str, keys: Sequence[bytes]) -> int:
        """Tokens of a prompt with these keys that a replica holds, or is expected to."""
        held = self._held.get(replica)
        return 0 if held is None else held.num_usable(keys, self._clock()) * self._block_tokens

    def choose(self, keys: Sequence[bytes], num_tokens: int, loads: Mapping[str, ReplicaLoad]) -> Route | None:
        """Choose the replica of a request; nothing is noted.

        Of replicas that cost the same, the one with the fewest open choices is taken; then one that the prompt's first
        key decides, so that routers that do not know of each other agree; without keys the one that waited longest.

        Args:
            keys: of the prompt's full blocks.
            num_tokens: of the prompt.
            loads: of the replicas that may be chosen, by name: those that are ready and not draining.

        Returns:
            None if no replica may be chosen.
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
