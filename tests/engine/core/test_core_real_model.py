"""A real model: cached blocks, shared prompts and drafts change when tokens come, and never which."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.engine.loading import find_checkpoint, load_core
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Policy
from step_inputs import TokenOutput, stepped
from wider import wider

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.0, seed=3, top_p=0.9, repetition_penalty=1.1)
# ids of English words, so that the model has something to go on with; the end repeats the beginning
TEXT = tuple(range(1000, 1090)) + (7050, 282, 260, 3575, 314) * 6
PERIODIC = (504, 3575, 282, 4649, 314, 7042, 30, 378) * 9


def run(core: EngineCore, requests: Sequence[Request]) -> dict[tuple[str, int], list[TokenOutput]]:
    """Run all requests together, with an audit after every step."""
    for request in requests:
        core.add(request)
    outputs: dict[tuple[str, int], list[TokenOutput]] = defaultdict(list)
    while core.has_work:
        for output in stepped(core):
            outputs[output.request_id, output.choice].append(output)
        core.audit()
    return outputs


def tokens(outputs: list[TokenOutput]) -> tuple[int, ...]:
    return tuple(token_id for output in outputs for token_id in output.token_ids)


@pytest.fixture(scope="module")
def plain(smollm2_path: Path) -> Iterator[EngineCore]:
    """An engine without prefix cache and without drafts."""
    core = make_core(smollm2_path, prefix_cache=False)
    yield core
    core.close()


@pytest.fixture(scope="module")
def sharing(smollm2_path: Path) -> Iterator[EngineCore]:
    core = make_core(smollm2_path)
    yield core
    core.close()


def make_core(path: Path, **options: object) -> EngineCore:
    config = EngineConfig(threads=2, context_length=512, max_running=4, max_step_tokens=64, **options)  # type: ignore[arg-type]
    return load_core(find_checkpoint(path), config)


@pytest.mark.parametrize("streams", wider([16, 64], 16))
def test_streams_at_once_are_what_each_is_alone(smollm2_path: Path, streams: int) -> None:
    """Prompts of 4 to 25 tokens that come at once; all run side by side before the first one ends.

    Alone, on one thread: with as many processes beside, threads would wait for each other most of the time.
    """
    requests = [Request(str(n), (1000 + 37 * n, *TEXT[n : n + 3 + n % 22]), GREEDY, 8 + n % 5) for n in range(streams)]
    checkpoint = find_checkpoint(smollm2_path)
    config = EngineConfig(threads=2, context_length=64, max_running=streams, max_step_tokens=256)
    together: dict[str, list[TokenOutput]] = defaultdict(list)
    most_running = 0
    core = load_core(checkpoint, config, policy=Policy(stretch=math.inf))
    try:
        for request in requests:
            core.add(request)
        while core.has_work:
            for output in stepped(core):
                together[output.request_id].append(output)
            most_running = max(most_running, core.scheduler.counts.num_running)
            core.audit()
    finally:
        core.close()
    assert most_running == streams
    core = load_core(checkpoint, replace(config, threads=1, max_running=1, prefix_cache=False))
    try:
        for request in requests:
            alone = run(core, [request])[request.request_id, 0]
            assert tokens(together[request.request_id]) == tokens(alone)
            assert len(tokens(alone)) == request.max_tokens or alone[-1].finish_reason == "stop"
    finally:
        core.close()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_hit_changes_nothing(plain: EngineCore, sharing: EngineCore, sampling: SamplingParams) -> None:
    """The same prompt, one that goes on from it and its answer, and one that leaves it half way."""
    first = run(plain, [Request("a", TEXT, sampling, 20)])["a", 0]
    again = (*TEXT, *tokens(first), 338, 260)
    half = (*TEXT[:50], *TEXT[10:60])
    asked = (("a", TEXT, 20), ("b", again, 12), ("c", half, 12))
    salt = str(sampling)  # what the other sampling has cached is not found
    requests = [Request(name, prompt, sampling, most, cache_salt=salt) for name, prompt, most in asked]
    run(sharing, requests[:1])
    hit, missed = run(sharing, requests), run(plain, requests)
    assert [hit[name, 0][0].num_cached_tokens for name in "abc"] == [96, 128, 32]
    assert [missed[name, 0][0].num_cached_tokens for name in "abc"] == [0, 0, 0]
    assert {key: tokens(outputs) for key, outputs in hit.items()} == {
        key: tokens(outputs) for key, outputs in missed.items()
    }


def test_a_cached_prefix_of_1000_tokens_is_not_read_again(smollm2_path: Path) -> None:
    """`scripts/time_scheduling.py smollm2:135m prefix` measures the time that this saves."""
    beginning = tuple(1000 + 7 * index % 40_000 for index in range(1000))
    core = load_core(find_checkpoint(smollm2_path), EngineConfig(threads=2, context_length=1024, max_running=2))
    try:
        (first,) = run(core, [Request("a", (*beginning, 1, 2), GREEDY, 1)])["a", 0]
        (second,) = run(core, [Request("b", (*beginning, 3, 4), GREEDY, 1)])["b", 0]
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 992)
        assert core.scheduler.counts.prefix_cache_hits == 992
    finally:
        core.close()


def test_choices_share_the_prompt(plain: EngineCore, sharing: EngineCore) -> None:
    sampling = SamplingParams(temperature=1.0, seed=9, n=3)
    prompt = TEXT[5:110]
    before = sharing.scheduler.counts
    shared, alone = run(sharing, [Request("a", prompt, sampling, 16)]), run(plain, [Request("a", prompt, sampling, 16)])
    assert sharing.scheduler.counts.prefix_cache_hits - before.prefix_cache_hits == 2 * 96
    assert len({tokens(outputs) for outputs in shared.values()}) == 3
    assert {key: tokens(outputs) for key, outputs in shared.items()} == {
        key: tokens(outputs) for key, outputs in alone.items()
    }


def test_scores_of_a_cached_prompt_are_those_of_a_new_one(plain: EngineCore, sharing: EngineCore) -> None:
    run(sharing, [Request("a", TEXT, GREEDY, 1)])
    asked = Request("a", TEXT, SamplingParams(temperature=0.0, prompt_logprobs=2), 0)
    scored = [run(core, [asked])["a", 0] for core in (plain, sharing)]
    both = [[entry for output in outputs for entry in output.prompt_logprobs] for outputs in scored]
    assert len(both[0]) == len(TEXT) - 1
    assert both[0] == both[1]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_pooled_vector_does_not_depend_on_what_is_cached(
    plain: EngineCore, sharing: EngineCore, pooling: str
) -> None:
    run(sharing, [Request("a", TEXT, GREEDY, 1)])
    asked = Request("a", TEXT, GREEDY, 0, pooling=pooling)  # type: ignore[arg-type]
    vectors = [run(core, [asked])["a", 0][-1].pooled for core in (plain, sharing)]
    assert vectors[0] is not None
    assert len(vectors[0]) == plain.spec.hidden_size
    assert vectors[0] == vectors[1]


def test_drafts_change_nothing(plain: EngineCore, smollm2_path: Path) -> None:
    """Greedy and sampled text, some of it beside others, with drafts that come true and drafts that do not."""
    requests = [
        Request("periodic", PERIODIC, GREEDY, 40),
        Request("greedy", TEXT, GREEDY, 30),
        Request("sampled", PERIODIC, SAMPLED, 30),
    ]
    core = make_core(smollm2_path, speculative_tokens=4)
    try:
        drafted = run(core, requests)
        counts = core.scheduler.counts
    finally:
        core.close()
    wanted = run(plain, requests)
    assert {key: tokens(outputs) for key, outputs in drafted.items()} == {
        key: tokens(outputs) for key, outputs in wanted.items()
    }
    assert 0 < counts.accepted_tokens < counts.draft_tokens
    steps = len(drafted["periodic", 0])
    assert steps < 0.6 * len(wanted["periodic", 0])
