"""Random arrivals, aborts and lengths through small pools: every request gets what its history alone gives.

Prompts share beginnings, go on from what others answered, come with salts, priorities, several choices, prompt
log-probabilities or pooling; drafts come true about every other time, because few ids are in play. The scripted backend
reads each history back through block tables, so a block shared wrongly, freed too soon or left stale changes tokens or
raises. The audit runs after every step.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.errors import QueueFullError
from realizar.outputs import TokenLogprobs
from realizar.request import Client, Pooling, Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.drafts import PromptLookup
from resolving import new_core
from scripted_backend import ScriptedBackend, choose, history_states, logprobs_of, make_spec, pooled_of
from step_inputs import TokenOutput, stepped
from wider import wider

NUM_IDS = 4
STOP_ID = 3
POOLINGS: tuple[Pooling, ...] = ("last", "mean")
CONTEXT = 36


@dataclass
class Received:
    """The results of one choice."""

    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: TokenOutput | None = None

    def take_in(self, output: TokenOutput) -> None:
        assert self.last is None
        self.token_ids.extend(output.token_ids)
        self.prompt_logprobs.extend(output.prompt_logprobs)
        if output.finish_reason is not None:
            self.last = output


CLIENTS = (*(Client("busy"),) * 4, Client("a"), Client("b", weight=2))


class Arrivals:
    """Makes requests, some of which begin as others did or go on where others ended."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.texts = [self.ids(length) for length in (3, 9, 12, 14)]
        self.number = 0

    def ids(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(NUM_IDS) for _ in range(count))

    def next_request(self) -> Request:
        rng = self.rng
        self.number += 1
        begin = rng.choice(self.texts)[: rng.choice((20, 8, 0))] if rng.random() < 0.8 else ()
        prompt = (*begin, *self.ids(rng.randint(0, 5)))[:22] or (1,)
        kind = rng.random()
        sampling = SamplingParams(
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(3),
            n=rng.choice((1, 1, 1, 1, 2, 3)) if kind < 0.8 else 1,
            prompt_logprobs=1 if kind > 0.92 else None,
            stop_token_ids=(STOP_ID,) if rng.random() < 0.3 else (),
            min_tokens=rng.choice((0, 0, 3)),
        )
        pooling = rng.choice(POOLINGS) if 0.8 < kind < 0.86 else None
        max_tokens = 0 if pooling or kind > 0.97 else rng.randint(3, 14)
        return Request(
            str(self.number), prompt, sampling, max_tokens,
            priority=rng.choice((0, 0, 0, -1, 5)), cache_salt=rng.choice((None, None, None, "a")), pooling=pooling,
            client=rng.choice(CLIENTS),
        )  # fmt: skip

    def remember(self, text: tuple[int, ...]) -> None:
        """Later prompts may begin with this text."""
        self.texts[self.rng.randrange(1, len(self.texts))] = text


def check(request: Request, choice: int, received: Received, windows: tuple[int | None, ...]) -> None:
    """Compare with what the history alone gives."""
    prompt, sampling = request.prompt_token_ids, request.sampling
    assert received.last is not None
    states = history_states((*prompt, *received.token_ids), windows)
    if request.pooling is not None:
        assert received.last.pooled == tuple(pooled_of(states, request.pooling).tolist())
    scored = [logprobs_of(states[at], prompt[at + 1], 1) for at in range(len(prompt) - 1)]
    assert received.prompt_logprobs == (scored if sampling.prompt_logprobs is not None and choice == 0 else [])
    for place, token_id in enumerate(received.token_ids):
        wanted = choose(states[len(prompt) - 1 + place], sampling, choice, num_ids=NUM_IDS)
        if place < sampling.min_tokens and wanted in sampling.stop_token_ids:
            wanted += 1  # ids after the last are not forbidden
        assert token_id == wanted
    stops = [
        place >= sampling.min_tokens and token_id in sampling.stop_token_ids
        for place, token_id in enumerate(received.token_ids)
    ]
    assert not any(stops[:-1])
    stopped = bool(stops) and stops[-1]
    assert received.last.finish_reason == ("stop" if stopped else "length")
    assert stopped or len(received.token_ids) == request.max_tokens
    assert 0 <= received.last.num_cached_tokens < len(prompt)


def run(
    arrivals: int, windows: tuple[int | None, ...], steps_in_flight: int, drafts: int, num_blocks: int, seed: int,
    proposes: bool = False,
) -> EngineCore:  # fmt: skip
    """All arrivals, each ended, aborted or refused; nothing is open at the end. With `proposes` the backend drafts."""
    source = Arrivals(seed)
    rng = source.rng
    backend = ScriptedBackend(
        windows, num_blocks=[num_blocks] * len(windows), max_rows=6, max_step_tokens=14, context_length=CONTEXT,
        num_ids=NUM_IDS, num_drafts=drafts if proposes else 0,
    )  # fmt: skip
    config = EngineConfig(
        max_running=6, max_step_tokens=14, max_queued=8, speculative_tokens=drafts,
        prompt_lookup_min=3 if proposes else 1,
    )  # fmt: skip
    drafter = PromptLookup(drafts, config.prompt_lookup_max, config.prompt_lookup_min) if drafts else None
    if drafter is not None:
        drafter.awaits_results = steps_in_flight == 1  # with two in flight, too, where the engine would wait
    core = new_core(backend, make_spec(windows), config, steps_in_flight=steps_in_flight, drafter=drafter)
    core.scheduler._clock = lambda: 1e-3 * backend.num_tokens  # a busy machine is no slower
    requests: dict[str, Request] = {}
    received: dict[tuple[str, int], Received] = {}
    refused = aborted = finished = 0
    while source.number < arrivals or core.has_work:
        while source.number < arrivals and rng.random() < (0.5 if len(requests) < 11 else 0.05):
            request = source.next_request()
            try:
                core.add(request)
            except QueueFullError:
                refused += 1
                continue
            requests[request.request_id] = request
            received |= {(request.request_id, choice): Received() for choice in range(request.sampling.n)}
        if requests and rng.random() < 0.03:
            name = rng.choice(list(requests))
            choice = rng.choice((None, 0))
            core.abort(name, choice)
            core.audit()
            for key in [key for key in received if key[0] == name and choice in (None, key[1])]:
                del received[key]
                aborted += 1
        for output in stepped(core):
            key = output.request_id, output.choice
            received[key].take_in(output)
            if output.finish_reason is not None:
                request, got = requests[output.request_id], received.pop(key)
                check(request, output.choice, got, windows)
                source.remember((*request.prompt_token_ids, *got.token_ids))
                finished += 1
        core.audit()
        for name in [name for name in requests if not any(key[0] == name for key in received)]:
            del requests[name]
    assert not requests
    assert not received
    assert backend.rows == {}
    assert finished > arrivals / 4
    assert aborted > arrivals / 100
    assert 0 < refused < arrivals / 3
    return core


@pytest.mark.parametrize(
    ("windows", "steps_in_flight", "drafts", "num_blocks", "proposes"),
    wider(
        [((None,), 1, 3, 12, False), ((None,), 2, 0, 11, False), ((None, 7), 1, 2, 14, False), ((5,), 2, 3, 9, False),
         ((None,), 1, 3, 12, True), ((None, 7), 2, 2, 14, True)],
        ((None,), 2, 0, 11, False),
        ((5,), 2, 3, 9, False),
        ((None, 7), 2, 2, 14, True),
    ),
)  # fmt: skip
def test_everyone_gets_what_its_history_gives(
    windows: tuple[int | None, ...], steps_in_flight: int, drafts: int, num_blocks: int, proposes: bool
) -> None:
    core = run(500, windows, steps_in_flight, drafts, num_blocks, num_blocks, proposes)
    counts = core.scheduler.counts
    assert counts.num_preemptions > 10
    assert counts.prefix_cache_hits > 0.1 * counts.prefix_cache_queries
    assert (counts.draft_tokens > 40) is (drafts > 0)
    assert (counts.accepted_tokens > 6) is (drafts > 0)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(12))
def test_everyone_gets_what_its_history_gives_at_length(seed: int) -> None:
    windows = ((None,), (None, 7), (6, None), (5,), (3, 11), (None, 20))[seed % 6]
    run(10_000, windows, 1 + seed % 2, seed % 4, 9 + seed, seed, proposes=seed % 3 == 0)
