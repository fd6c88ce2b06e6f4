"""The choice of a replica: its properties, and what it brings in a simulation beside one cache and round robin."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realizar.replicas.routing import CHOICE_TOKENS, PREFIX_WEIGHT, KeyChanges, KeyReport, PrefixRouter, ReplicaLoad
from replicas.simulated_replicas import (
    BLOCK_TOKENS,
    SimulatedReplica,
    SimulatedRequest,
    ideal_cached_tokens,
    prompt_keys,
    run_round_robin,
    run_router,
)

NAMES = ("a", "b", "c", "d")
_LOADS = st.dictionaries(
    st.sampled_from(NAMES), st.builds(ReplicaLoad, st.integers(0, 10_000), st.integers(0, 100)), min_size=1
)


def _router(**held: tuple[bytes, ...]) -> PrefixRouter:
    router = PrefixRouter(BLOCK_TOKENS, clock=lambda: 0.0)
    for name in NAMES:
        router.begin(name, 0)
        assert router.report(name, KeyReport(0, 0, KeyChanges(held.get(name, ()))))
    return router


def _keys(num_blocks: int) -> tuple[bytes, ...]:
    return prompt_keys("family", num_tokens=num_blocks * BLOCK_TOKENS)


@given(_LOADS, st.integers(0, 12), st.lists(st.integers(0, 12), min_size=4, max_size=4))
def test_the_chosen_replica_is_the_cheapest_of_those_that_may_be_chosen(
    loads: Mapping[str, ReplicaLoad], num_blocks: int, held: list[int]
) -> None:
    keys = _keys(12)
    router = _router(**{name: keys[:count] for name, count in zip(NAMES, held, strict=True)})
    num_tokens = num_blocks * BLOCK_TOKENS + 5
    route = router.choose(keys[:num_blocks], num_tokens, loads)
    assert route is not None

    def cost(name: str) -> float:
        cached = min(held[NAMES.index(name)], num_blocks) * BLOCK_TOKENS
        load = loads[name]
        return PREFIX_WEIGHT * (num_tokens - cached) + load.pending_tokens + CHOICE_TOKENS * load.num_open

    assert route.replica in loads
    assert cost(route.replica) == min(map(cost, loads))
    assert route.num_cached_tokens == min(held[NAMES.index(route.replica)], num_blocks) * BLOCK_TOKENS


def test_no_replica_is_chosen_of_none() -> None:
    assert _router().choose(_keys(3), 100, {}) is None


def test_of_equal_loads_the_longest_prefix_is_chosen() -> None:
    keys = _keys(8)
    router = _router(a=keys[:2], b=keys[:7], c=keys[:4], d=(keys[7],))
    route = router.choose(keys, 300, dict.fromkeys(NAMES, ReplicaLoad(100, 3)))
    assert route is not None
    assert (route.replica, route.num_cached_tokens) == ("b", 7 * BLOCK_TOKENS)


def test_requests_of_a_family_that_come_before_its_first_report_stay_together() -> None:
    router, keys = _router(), _keys(8)
    loads = dict.fromkeys(NAMES, ReplicaLoad())
    first = router.choose(keys, 260, loads)
    assert first is not None
    router.placed(first.replica, keys)
    second = router.choose(keys, 260, {**loads, first.replica: ReplicaLoad(260, 1)})
    assert second is not None
    assert (second.replica, second.num_cached_tokens) == (first.replica, 8 * BLOCK_TOKENS)


@pytest.mark.parametrize("num_blocks", [4, 32])
def test_a_hot_family_is_copied_when_its_replica_is_too_far_behind_and_a_short_prefix_sooner(num_blocks: int) -> None:
    keys = _keys(num_blocks)
    router = _router(a=keys)
    num_tokens = num_blocks * BLOCK_TOKENS
    enough = int(PREFIX_WEIGHT * num_tokens / CHOICE_TOKENS)
    idle = dict.fromkeys(NAMES, ReplicaLoad())
    kept = router.choose(keys, num_tokens, {**idle, "a": ReplicaLoad(0, enough - 1)})
    copied = router.choose(keys, num_tokens, {**idle, "a": ReplicaLoad(0, enough + 1)})
    assert kept is not None
    assert copied is not None
    assert kept.replica == "a"
    assert copied.replica != "a"


def test_a_restarted_replica_begins_empty_and_reports_of_its_past_are_ignored() -> None:
    keys = _keys(4)
    router = _router(a=keys)
    router.placed("a", keys)
    router.begin("a", 0)
    assert router.num_cached_tokens("a", keys) == 4 * BLOCK_TOKENS
    router.begin("a", 1)
    assert router.num_cached_tokens("a", keys) == 0
    assert not router.report("a", KeyReport(0, 1, KeyChanges(keys)))
    assert router.num_cached_tokens("a", keys) == 0
    router.leave("a")
    assert router.replicas == ("b", "c", "d")
    assert not router.report("a", KeyReport(1, 0))


def test_routers_that_do_not_know_of_each_other_agree_on_a_family_that_is_nowhere() -> None:
    loads = dict.fromkeys(NAMES, ReplicaLoad())
    chosen: list[str] = []
    for number in range(64):
        keys = prompt_keys(f"family {number}", num_tokens=96)
        routes = {router.choose(keys, 100, loads) for router in (_router(), _router())}
        assert len(routes) == 1
        route = routes.pop()
        assert route is not None
        chosen.append(route.replica)
    assert set(chosen) == set(NAMES)


def test_prompts_shorter_than_a_block_go_to_idle_replicas_in_turn() -> None:
    router, chosen = _router(), []
    for _ in range(8):
        route = router.choose((), 7, dict.fromkeys(NAMES, ReplicaLoad()))
        assert route is not None
        router.placed(route.replica, ())
        chosen.append(route.replica)
    assert sorted(chosen) == sorted((*NAMES, *NAMES))


def _streams(family_of: Callable[[random.Random, int], int], prefix: int) -> list[deque[SimulatedRequest]]:
    numbers = random.Random(1)
    return [
        deque(
            SimulatedRequest(
                prompt_keys(str(family_of(numbers, stream)), f"{stream}/{turn}", num_tokens=prefix + 64),
                prefix + 64,
                numbers.randint(16, 64),
            )
            for turn in range(4)
        )
        for stream in range(64)
    ]


def _replicas(num_blocks: int) -> dict[str, SimulatedReplica]:
    return {name: SimulatedReplica(num_blocks) for name in NAMES}


@pytest.mark.parametrize("prefix", [128, 1024])
@pytest.mark.parametrize(
    ("kind", "family_of"),
    [
        ("a family a stream", lambda numbers, stream: stream % 8),
        ("families at random", lambda numbers, stream: numbers.randrange(8)),
        ("one hot family", lambda numbers, stream: 0 if numbers.random() < 0.8 else numbers.randrange(8)),
        ("one family", lambda numbers, stream: 0),
    ],
)
def test_the_simulated_cached_share_is_nearly_that_of_one_cache_and_nothing_is_slower(
    kind: str, family_of: Callable[[random.Random, int], int], prefix: int
) -> None:
    ideal = ideal_cached_tokens(_streams(family_of, prefix))
    routed = run_router(_streams(family_of, prefix), _replicas(4000))
    in_turn = run_round_robin(_streams(family_of, prefix), _replicas(4000))
    assert routed.cached_tokens >= 0.95 * ideal, kind
    assert routed.cached_tokens >= in_turn.cached_tokens, kind
    assert routed.seconds <= in_turn.seconds, kind


def test_small_caches_hold_more_families_together_than_round_robin_keeps() -> None:
    def family_of(numbers: random.Random, stream: int) -> int:
        return stream % 16

    routed = run_router(_streams(family_of, 1024), _replicas(300))
    in_turn = run_round_robin(_streams(family_of, 1024), _replicas(300))
    assert routed.cached_tokens > 1.5 * in_turn.cached_tokens


def test_the_share_hardly_depends_on_how_often_replicas_report() -> None:
    def family_of(numbers: random.Random, stream: int) -> int:
        return numbers.randrange(8)

    often, seldom = (run_router(_streams(family_of, 1024), _replicas(4000), report_s) for report_s in (0.0, 2.0))
    assert seldom.cached_tokens >= 0.98 * often.cached_tokens
