"""A simulation of replicas in steps: each has a least-recently-used cache of blocks, a token budget and a queue."""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from realizar.replicas.routing import KeyChanges, KeyReport, PrefixRouter, ReplicaLoad

BLOCK_TOKENS = 32
_STEP_TOKENS = 512
_FIXED_STEP_S, _TOKEN_S = 0.02, 0.001


@dataclass
class SimulatedRequest:
    """A request.

    Attributes:
        num_wanted: tokens to generate.
        num_expected: prompt tokens that the router thought cached.
        num_computed: of the prompt, cached ones included.
    """

    keys: tuple[bytes, ...]
    num_tokens: int
    num_wanted: int
    num_expected: int = 0
    num_computed: int = 0
    num_cached: int = 0
    num_generated: int = 0
    has_started: bool = False


def prompt_keys(*parts: str, num_tokens: int) -> tuple[bytes, ...]:
    """Keys of a prompt whose first blocks depend on the first part alone, and whose last one depends on all parts."""
    count = num_tokens // BLOCK_TOKENS
    keys: list[bytes] = []
    parent = b""
    for place in range(count):
        text = "/".join(parts) if place == count - 1 else parts[0]
        parent = hashlib.sha256(parent + text.encode()).digest()[:16]
        keys.append(parent)
    return tuple(keys)


@dataclass
class SimulatedReplica:
    """One engine: decodes first, then prompts in order; a prompt waits while its next block is being computed."""

    num_blocks: int
    cached: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    open: list[SimulatedRequest] = field(default_factory=list)
    now_s: float = 0.0
    added: list[bytes] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)

    @property
    def load(self) -> ReplicaLoad:
        """The load as an API process sees it, which learns of first tokens alone."""
        waiting = [each for each in self.open if not each.num_generated]
        return ReplicaLoad(sum(each.num_tokens - each.num_expected for each in waiting), len(self.open))

    def step(self) -> list[SimulatedRequest]:
        """Run a step; returns the requests that ended."""
        left = _STEP_TOKENS
        for each in self.open:
            if each.has_started and each.num_computed == each.num_tokens:
                each.num_generated += 1
                left -= 1
        computing: set[bytes] = set()
        for each in self.open:
            if each.num_computed < each.num_tokens and left > 0:
                left -= self._read(each, left, computing)
        self.now_s += _FIXED_STEP_S + _TOKEN_S * (_STEP_TOKENS - left)
        ended = [each for each in self.open if each.num_generated >= each.num_wanted]
        self.open = [each for each in self.open if each.num_generated < each.num_wanted]
        return ended

    def report(self) -> KeyChanges:
        """The changes since the last report."""
        changes = KeyChanges(tuple(self.added), tuple(self.removed))
        self.added, self.removed = [], []
        return changes

    def _read(self, request: SimulatedRequest, most: int, computing: set[bytes]) -> int:
        if not request.has_started:
            usable = len(list(itertools.takewhile(lambda key: key in self.cached, request.keys)))
            if request.keys[usable : usable + 1] and request.keys[usable] in computing:
                return 0
            request.has_started = True
            request.num_cached = request.num_computed = min(usable * BLOCK_TOKENS, request.num_tokens - 1)
        count = min(most, request.num_tokens - request.num_computed)
        request.num_computed += count
        done = request.num_computed // BLOCK_TOKENS
        computing.update(request.keys[done:])
        for key in request.keys[:done]:
            self._hold(key)
        return count

    def _hold(self, key: bytes) -> None:
        if key not in self.cached:
            self.added.append(key)
        self.cached[key] = None
        self.cached.move_to_end(key)
        while len(self.cached) > self.num_blocks:
            self.removed.append(self.cached.popitem(last=False)[0])


@dataclass(frozen=True)
class Outcome:
    """What a run of a simulation came to."""

    cached_tokens: int
    prompt_tokens: int
    seconds: float
    most_uneven: int

    @property
    def cached_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens


Policy = Callable[[SimulatedRequest, Mapping[str, ReplicaLoad]], str]


def simulate(
    streams: Sequence[deque[SimulatedRequest]],
    replicas: Mapping[str, SimulatedReplica],
    policy: Policy,
    on_report: Callable[[str, KeyChanges], None] = lambda name, changes: None,
    report_s: float = 0.05,
) -> Outcome:
    """Run streams to their ends: each sends its next request when the last one has ended."""
    all_requests = [each for stream in streams for each in stream]
    owner: dict[int, deque[SimulatedRequest]] = {}
    uneven = 0

    def send(stream: deque[SimulatedRequest], now_s: float) -> None:
        if stream:
            request = stream.popleft()
            owner[id(request)] = stream
            replica = replicas[policy(request, {name: each.load for name, each in replicas.items()})]
            replica.now_s = max(replica.now_s, now_s)
            replica.open.append(request)

    for stream in streams:
        send(stream, 0.0)
    last_report = dict.fromkeys(replicas, 0.0)
    while any(each.open for each in replicas.values()):
        name, replica = min(
            ((name, each) for name, each in replicas.items() if each.open), key=lambda pair: pair[1].now_s
        )
        ended = replica.step()
        if replica.now_s - last_report[name] >= report_s:
            last_report[name] = replica.now_s
            on_report(name, replica.report())
        for request in ended:
            send(owner[id(request)], replica.now_s)
        counts = [len(each.open) for each in replicas.values()]
        uneven = max(uneven, max(counts) - min(counts))
    return Outcome(
        sum(each.num_cached for each in all_requests),
        sum(each.num_tokens for each in all_requests),
        max(each.now_s for each in replicas.values()),
        uneven,
    )


def run_router(
    streams: Sequence[deque[SimulatedRequest]], replicas: Mapping[str, SimulatedReplica], report_s: float = 0.05
) -> Outcome:
    """Run streams with the router, which gets each replica's reports."""
    now = [0.0]
    router = PrefixRouter(BLOCK_TOKENS, clock=lambda: now[0])
    numbers = dict.fromkeys(replicas, itertools.count())
    for name in replicas:
        numbers[name] = itertools.count()
        router.begin(name, 0)

    def policy(request: SimulatedRequest, loads: Mapping[str, ReplicaLoad]) -> str:
        now[0] = max(now[0], min(each.now_s for each in replicas.values()))
        route = router.choose(request.keys, request.num_tokens, loads)
        assert route is not None
        request.num_expected = route.num_cached_tokens
        router.placed(route.replica, request.keys)
        return route.replica

    def on_report(name: str, changes: KeyChanges) -> None:
        assert router.report(name, KeyReport(0, next(numbers[name]), changes))

    return simulate(streams, replicas, policy, on_report, report_s)


def run_round_robin(streams: Sequence[deque[SimulatedRequest]], replicas: Mapping[str, SimulatedReplica]) -> Outcome:
    """Run streams with replicas taken in turn."""
    turns = itertools.cycle(replicas)
    return simulate(streams, replicas, lambda request, loads: next(turns))


def ideal_cached_tokens(streams: Sequence[deque[SimulatedRequest]]) -> int:
    """Prompt tokens that one cache without bounds would spare, if every request were whole before the next one."""
    known: set[bytes] = set()
    cached = 0
    for position in range(max(map(len, streams))):
        for stream in streams:
            if position < len(stream):
                request = stream[position]
                usable = len(list(itertools.takewhile(known.__contains__, request.keys)))
                cached += min(usable * BLOCK_TOKENS, request.num_tokens - 1)
                known.update(request.keys)
    return cached
