"""Ray Serve's request router of the engines: which replicas it names, and in which order."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve")

from realizar.kv_cache.block_keys import CacheChanges
from realizar.ray.reported_keys import KEY_BYTES, HeldBlocks, RouteWish
from realizar.ray.router import PrefixRequestRouter

pytestmark = pytest.mark.ray
KEYS = tuple(bytes([number]) * 16 for number in range(8))
TOKENS = 16 * len(KEYS)


@dataclass
class Known:
    """A running replica as the router sees it."""

    name: str
    routing_stats: dict[str, Any] = field(default_factory=dict)

    @property
    def replica_id(self) -> Any:
        return SimpleNamespace(unique_id=self.name)


class Lengths:
    """No replica has said how many requests it has."""

    def get(self, replica_id: Any) -> None:
        return None


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> PrefixRequestRouter:
    """A router without Ray's own state, which its base class makes in a process of Ray's."""
    made = object.__new__(PrefixRequestRouter)
    made._replica_queue_len_cache = Lengths()
    made.initialize_state(block_tokens=16)
    monkeypatch.setattr(PrefixRequestRouter.__base__, "update_replicas", lambda self, replicas: None)
    return made


def report(*keys: bytes, incarnation: int = 0) -> dict[str, Any]:
    held = HeldBlocks()
    held.take(CacheChanges(b"".join(keys), complete=True))
    return held.report(incarnation)


def wish(keys: tuple[bytes, ...] = KEYS, avoided: str | None = None) -> RouteWish:
    return RouteWish([key[:KEY_BYTES] for key in keys], TOKENS, 1, avoided)


def ranked(router: PrefixRequestRouter, replicas: list[Known], *args: Any) -> list[list[str]]:
    request = SimpleNamespace(args=args, routing_context=SimpleNamespace(should_backoff=False))
    ranks = asyncio.run(router.choose_replicas(replicas, request))
    assert request.routing_context.should_backoff
    return [[replica.name for replica in rank] for rank in ranks]


def test_the_replica_with_the_longest_prefix_comes_first(router: PrefixRequestRouter) -> None:
    replicas = [Known("a", report(*KEYS[:2])), Known("b", report(*KEYS[:5])), Known("c")]
    router.update_replicas(replicas)
    assert ranked(router, replicas, b"request", wish()) == [["b"], ["a", "c"]]


def test_a_replica_that_lost_the_request_is_named_last(router: PrefixRequestRouter) -> None:
    replicas = [Known("a"), Known("b", report(*KEYS))]
    router.update_replicas(replicas)
    assert ranked(router, replicas, b"request", wish(avoided="b")) == [["a"], ["b"]]
    assert ranked(router, replicas[1:], b"request", wish(avoided="b")) == [["b"], []]


def test_what_was_sent_counts_before_a_report_and_its_load_until_it_ends(router: PrefixRequestRouter) -> None:
    replicas = [Known("a"), Known("b")]
    router.update_replicas(replicas)
    first = wish()
    ((chosen,), (other,)) = ranked(router, replicas, b"request", first)
    assert ranked(router, replicas, b"request", wish())[0] == [chosen]
    assert ranked(router, replicas, b"request", wish(keys=(b"x" * 16,)))[0] == [other]
    assert router._load(Known(chosen)).pending_tokens == 2 * TOKENS  # type: ignore[arg-type]
    first.has_ended = True
    assert router._load(Known(chosen)).num_open == 1  # type: ignore[arg-type]


def test_another_engine_in_a_replica_holds_nothing_of_the_one_before(router: PrefixRequestRouter) -> None:
    router.update_replicas([Known("a", report(*KEYS))])  # type: ignore[list-item]
    router.update_replicas([Known("a", report(incarnation=1)), Known("b", report(*KEYS[:1]))])  # type: ignore[list-item]
    assert ranked(router, [Known("a"), Known("b")], b"request", wish())[0] == ["b"]


def test_a_call_without_a_wish_may_go_anywhere(router: PrefixRequestRouter) -> None:
    replicas = [Known("a"), Known("b")]
    router.update_replicas(replicas)
    assert ranked(router, replicas) == [["a", "b"]]
