"""The step loop against the scripted backend: whatever the batching, the tokens are those of the row alone."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realizar.config import EngineConfig
from realizar.engine.core.engine_core import EngineCore
from realizar.errors import CapacityError, ContextLengthError, EngineDeadError, InvalidRequestError
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Pace, Policy
from resolving import new_core
from scripted_backend import (
    VOCAB_SIZE,
    ScriptedBackend,
    expected_tokens,
    history_states,
    logprobs_of,
    make_spec,
)
from step_inputs import TokenOutput, stepped
from wider import diagonal

GREEDY = SamplingParams(temperature=0.0)


def make_core(backend: ScriptedBackend, *, steps_in_flight: int = 1, policy: Policy | None = None) -> EngineCore:
    config = EngineConfig(max_running=1000, max_step_tokens=10_000)
    return new_core(backend, make_spec(backend.windows), config, steps_in_flight=steps_in_flight, policy=policy)


def make_request(
    name: str,
    prompt: Sequence[int],
    max_tokens: int,
    sampling: SamplingParams = GREEDY,
) -> Request:
    return Request(name, tuple(prompt), sampling, max_tokens)


def run_out(core: EngineCore, limit: int = 100_000) -> dict[tuple[str, int], list[TokenOutput]]:
    """Step until nothing is left, auditing after every step."""
    outputs: dict[tuple[str, int], list[TokenOutput]] = defaultdict(list)
    for _ in range(limit):
        if not core.has_work:
            return outputs
        for output in stepped(core):
            outputs[output.request_id, output.choice].append(output)
        core.audit()
    raise AssertionError("the engine does not come to an end")


def tokens_of(outputs: list[TokenOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def random_prompt(rng: random.Random, longest: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, longest))]


def test_the_pace_knows_the_sizes_of_the_backends_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Sequence[int]] = []

    def note(stretch: float, tile_tokens: int, least_s: float, sizes: Sequence[int]) -> Pace:
        given.append(sizes)
        return Pace(stretch, tile_tokens, least_s, sizes)

    monkeypatch.setattr("realizar.engine.core.engine_core.Pace", note)
    backend = ScriptedBackend()
    backend.limits = replace(backend.limits, step_sizes=(8, 16))
    core = make_core(backend)
    core.add(make_request("a", [5] * 50, 9))
    assert given == [(8, 16)]
    assert tokens_of(run_out(core)["a", 0]) == expected_tokens([5] * 50, (None,), GREEDY, 9)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_one_request(steps_in_flight: int) -> None:
    core = make_core(ScriptedBackend(), steps_in_flight=steps_in_flight)
    core.add(make_request("a", [5, 6, 7], 9))
    outputs = run_out(core)["a", 0]
    assert tokens_of(outputs) == expected_tokens([5, 6, 7], (None,), GREEDY, 9)
    assert [output.finish_reason for output in outputs] == [None] * 8 + ["length"]


@settings(max_examples=60)
@given(
    windows=st.sampled_from([(None,), (5,), (None, 6), (3, None), (4, 9)]),
    block_size=st.integers(1, 6),
    max_rows=st.integers(1, 6),
    max_step_tokens=st.integers(1, 24),
    tightness=st.floats(0, 1),
    steps_in_flight=st.integers(1, 2),
    policy=st.sampled_from(["decode", "prefill"]),
    requests=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(1, 3), st.booleans()), min_size=1, max_size=7
    ),
)
def test_tokens_do_not_depend_on_batching(
    windows: tuple[int | None, ...],
    block_size: int,
    max_rows: int,
    max_step_tokens: int,
    tightness: float,
    steps_in_flight: int,
    policy: str,
    requests: list[tuple[int, int, int, bool]],
) -> None:
    """Any windows, blocks, rows, budget, pool and look-ahead give what the history alone gives."""
    longest = max(prompt + output for prompt, output, _, _ in requests)
    least, most = -(-longest // block_size), -(-longest // block_size) * max_rows
    backend = ScriptedBackend(
        windows,
        block_size=block_size,
        num_blocks=[least + int((most - least) * tightness)] * len(windows),
        max_rows=max_rows,
        max_step_tokens=max_step_tokens,
    )
    core = make_core(
        backend, steps_in_flight=steps_in_flight, policy=Policy("prefill" if policy == "prefill" else "decode")
    )
    prompts, samplings = [], []
    for index, (length, max_tokens, n, greedy) in enumerate(requests):
        prompts.append([(index * 31 + place * 7) % VOCAB_SIZE for place in range(length)])
        samplings.append(SamplingParams(temperature=0.0 if greedy else 1.0, seed=index, n=n))
        core.add(make_request(str(index), prompts[-1], max_tokens, samplings[-1]))
    outputs = run_out(core)
    assert backend.rows == {}
    for index, (_, max_tokens, n, _) in enumerate(requests):
        for choice in range(n):
            wanted = expected_tokens(prompts[index], windows, samplings[index], max_tokens, choice)
            assert tokens_of(outputs[str(index), choice]) == wanted


@pytest.mark.parametrize(("windows", "steps_in_flight"), diagonal([(None,), (None, 7)], [1, 2]))
def test_random_arrivals_and_aborts(windows: tuple[int | None, ...], steps_in_flight: int) -> None:
    """Hundreds of arrivals and aborts through a pool that is too small for them: audited after every step."""
    rng = random.Random(len(windows) * 10 + steps_in_flight)
    blocks = [14] * len(windows)
    backend = ScriptedBackend(windows, num_blocks=blocks, max_rows=6, max_step_tokens=12, context_length=48)
    core = make_core(backend, steps_in_flight=steps_in_flight)
    open_requests: dict[str, Request] = {}
    tokens: dict[str, list[int]] = defaultdict(list)
    arrived = finished = aborted = 0
    while arrived < 300 or core.has_work:
        while arrived < 300 and len(open_requests) < 12 and rng.random() < 0.7:
            sampling = SamplingParams(temperature=0.0, stop_token_ids=(3, 4))
            request = make_request(str(arrived), random_prompt(rng, 24), rng.randint(1, 16), sampling)
            core.add(request)
            open_requests[request.request_id] = request
            arrived += 1
        if open_requests and rng.random() < 0.05:
            name = rng.choice(list(open_requests))
            core.abort(name)
            del open_requests[name]
            aborted += 1
        for output in stepped(core):
            tokens[output.request_id].extend(output.token_ids)
            if output.finish_reason is not None:
                check_finished(open_requests.pop(output.request_id), tokens[output.request_id], windows, output)
                finished += 1
        core.audit()
    assert (arrived, finished + aborted) == (300, 300)
    assert aborted > 10
    assert core.scheduler.counts.num_preemptions > 50
    assert backend.rows == {}


def check_finished(request: Request, tokens: list[int], windows: Sequence[int | None], last: TokenOutput) -> None:
    wanted = expected_tokens(request.prompt_token_ids, windows, request.sampling, len(tokens))
    assert tokens == wanted
    stops = [token_id in request.sampling.stop_token_ids for token_id in tokens]
    assert not any(stops[:-1])
    assert last.finish_reason == ("stop" if stops[-1] else "length")
    assert last.stop_token_id == (tokens[-1] if stops[-1] else None)
    assert stops[-1] or len(tokens) == request.max_tokens


def test_the_last_to_come_gives_way_and_all_finish() -> None:
    backend = ScriptedBackend(num_blocks=[8], block_size=2, max_rows=4, max_step_tokens=8, context_length=17)
    core = make_core(backend)
    for index in range(6):
        core.add(make_request(str(index), [index, 1, 2], 12))
    done = []
    while core.has_work:
        done += [output.request_id for output in stepped(core) if output.finish_reason]
        core.audit()
    assert done == [str(index) for index in range(6)]
    assert core.scheduler.counts.num_preemptions > 0


def test_window_blocks_are_freed() -> None:
    """A window of 6 in blocks of 2 never holds more than 4 blocks in decode, however long the sequence grows."""
    backend = ScriptedBackend((6,), num_blocks=[4], block_size=2, max_rows=1, max_step_tokens=1, context_length=120)
    core = make_core(backend)
    core.add(make_request("a", [9], 110))
    assert tokens_of(run_out(core)["a", 0]) == expected_tokens([9], (6,), GREEDY, 110)


def test_decodes_keep_their_pace_while_a_long_prompt_is_read() -> None:
    backend = ScriptedBackend(num_blocks=[200], max_step_tokens=8)
    core = make_core(backend)
    core.add(make_request("short", [1], 60))
    stepped(core)
    core.add(make_request("long", [2] * 200, 2))
    for _ in range(25):
        assert [output.request_id for output in stepped(core)] == ["short"]


def test_prefill_first_reads_every_prompt_before_the_first_decode() -> None:
    backend = ScriptedBackend(num_blocks=[200], max_step_tokens=8)
    core = make_core(backend, policy=Policy("prefill"))
    for index in range(4):
        core.add(make_request(str(index), [index] * 10, 5))
    outputs = [output for _ in range(6) for output in stepped(core)]
    assert [output.request_id for output in outputs[:4]] == ["0", "1", "2", "3"]
    assert len(outputs) == 8


@pytest.mark.parametrize("max_step_tokens", [1, 3, 16])
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_prompt_logprobs(max_step_tokens: int, max_tokens: int) -> None:
    """Every prompt position but the first is scored once, by the tokens before it."""
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=1, n=2)
    core = make_core(ScriptedBackend(max_step_tokens=max_step_tokens))
    core.add(make_request("a", prompt, max_tokens, sampling))
    outputs = run_out(core)
    states = history_states(prompt, (None,))
    scored = [entry for output in outputs["a", 0] for entry in output.prompt_logprobs]
    assert scored == [logprobs_of(states[at], prompt[at + 1], 2) for at in range(len(prompt) - 1)]
    assert [entry for output in outputs["a", 1] for entry in output.prompt_logprobs] == []
    assert len(tokens_of(outputs["a", 0])) == max_tokens
    assert [entry.token_id for o in outputs["a", 0] for entry in o.logprobs] == tokens_of(outputs["a", 0])
    assert outputs["a", 0][-1].finish_reason == "length"


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_prompt_logprobs_survive_preemption(steps_in_flight: int) -> None:
    backend = ScriptedBackend(num_blocks=[12], block_size=2, max_rows=4, max_step_tokens=5, context_length=24)
    core = make_core(backend, steps_in_flight=steps_in_flight)
    prompts = [[index, 2, 3, 4, 5, 6, 7, 8] for index in range(5)]
    for index, prompt in enumerate(prompts):
        core.add(make_request(str(index), prompt, 14, SamplingParams(temperature=0.0, prompt_logprobs=0)))
    outputs = run_out(core)
    assert core.scheduler.counts.num_preemptions > 0
    for index, prompt in enumerate(prompts):
        states = history_states(prompt, (None,))
        scored = [entry for output in outputs[str(index), 0] for entry in output.prompt_logprobs]
        assert scored == [logprobs_of(states[at], prompt[at + 1], 0) for at in range(7)]


def test_stop_tokens_are_not_sampled_before_min_tokens() -> None:
    free = expected_tokens([1, 2], (None,), GREEDY, 6)
    core = make_core(ScriptedBackend())
    core.add(make_request("free", [1, 2], 6, SamplingParams(temperature=0.0, stop_token_ids=(free[2],))))
    least_five = SamplingParams(temperature=0.0, min_tokens=5, stop_token_ids=(free[2],))
    core.add(make_request("min", [1, 2], 6, least_five))
    outputs = run_out(core)
    assert tokens_of(outputs["free", 0]) == free[:3]
    least = tokens_of(outputs["min", 0])
    assert least[:2] == free[:2]
    assert free[2] not in least[:5]
    assert len(least) in (5, 6)


def test_sampled_choices_differ_and_repeat_with_the_seed() -> None:
    runs = []
    for max_rows in (1, 8):
        core = make_core(ScriptedBackend(max_rows=max_rows))
        core.add(make_request("a", [8, 9], 10, SamplingParams(seed=11, n=4)))
        outputs = run_out(core)
        runs.append([tokens_of(outputs["a", choice]) for choice in range(4)])
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 4


def test_a_choice_can_end_alone() -> None:
    core = make_core(ScriptedBackend())
    core.add(make_request("a", [8, 9], 10, SamplingParams(seed=11, n=2)))
    stepped(core)
    core.abort("a", 0)
    outputs = run_out(core)
    assert ("a", 0) not in outputs
    assert outputs["a", 1][-1].finish_reason == "length"


def test_an_aborted_request_id_can_be_used_again_at_once() -> None:
    core = make_core(ScriptedBackend(), steps_in_flight=2)
    core.add(make_request("a", [8, 9], 10))
    stepped(core)
    stepped(core)
    core.abort("a")
    core.add(make_request("a", [7], 3))
    assert tokens_of(run_out(core)["a", 0]) == expected_tokens([7], (None,), GREEDY, 3)


def test_requests_that_never_fit_are_refused_with_counts() -> None:
    core = make_core(ScriptedBackend(num_blocks=[10], context_length=64))
    with pytest.raises(ContextLengthError, match="is 64 tokens; the prompt has 60 and 5 are to be generated"):
        core.add(make_request("a", [1] * 60, 5))
    with pytest.raises(CapacityError, match=r"49 tokens; the 10 blocks of 4 tokens hold at most 40"):
        core.add(make_request("a", [1] * 20, 30))
    with pytest.raises(InvalidRequestError, match="empty"):
        core.add(make_request("a", [], 3))
    core.add(make_request("a", [1] * 30, 11))  # 41 tokens, of which the last is never stored
    with pytest.raises(InvalidRequestError, match="in use"):
        core.add(make_request("a", [1], 1))
    assert len(tokens_of(run_out(core)["a", 0])) == 11


def test_a_failed_step_ends_the_engine_for_everyone() -> None:
    core = make_core(ScriptedBackend(fail_at=3))
    core.add(make_request("a", [1], 50))
    stepped(core)
    stepped(core)
    with pytest.raises(EngineDeadError, match="the device fell off the bus"):
        stepped(core)
    with pytest.raises(EngineDeadError, match="the device fell off the bus"):
        stepped(core)
    with pytest.raises(EngineDeadError, match="the device fell off the bus"):
        core.add(make_request("b", [1], 5))
    assert not core.has_work


def test_close_shuts_the_backend_down() -> None:
    backend = ScriptedBackend()
    core = make_core(backend)
    core.close()
    core.close()
    assert backend.down
    with pytest.raises(EngineDeadError, match="closed"):
        core.add(make_request("a", [1], 1))


def test_rows_share_steps() -> None:
    backend = ScriptedBackend(num_blocks=[200], max_rows=8)
    core = make_core(backend)
    for index in range(8):
        core.add(make_request(str(index), [index], 6))
    run_out(core)
    assert backend.most_rows == 8
    assert backend.num_steps <= 8


def test_reading_is_paced_where_somebody_streams_and_not_where_nobody_does() -> None:
    """A backend whose steps take a millisecond a token: beside a stream, a prompt comes in chunks of a few tokens."""
    longest = {}
    for stretch in (2.5, math.inf):
        backend = ScriptedBackend(num_blocks=[200], max_step_tokens=64)
        core = make_core(backend, policy=Policy(stretch=stretch, least_step_s=0.0))
        core.scheduler._clock = lambda backend=backend: 1e-3 * backend.num_tokens
        core.add(make_request("stream", [1] * 64, 150))
        for _ in range(10):
            stepped(core)
        core.add(make_request("long", [2] * 180, 1))
        before, tokens = backend.num_tokens, []
        while all(output.request_id != "long" for output in stepped(core)):
            tokens.append(backend.num_tokens - before)
            before = backend.num_tokens
        longest[stretch] = max(tokens)
    assert longest == {2.5: 3, math.inf: 64}
