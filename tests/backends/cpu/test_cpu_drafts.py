"""Drafts change how many steps a text takes, and nothing else: same tokens, same log-probabilities, bit by bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.cpu.cpu_rows import Part, plain_decode, run_step
from cpu_runs import Runner
from random_models import Recipe, random_model, random_tokens
from realizar.batch import LogprobQuery
from realizar.config import EngineConfig
from realizar.sampling_params import SamplingParams
from step_inputs import opened_row
from wider import diagonal

RECIPE = Recipe(vocab_size=96)
RECIPES = {
    "attention": RECIPE,
    "convolutions": replace(RECIPE, windows=(None, 40, None), recurrent=("convolution", None, "convolution"), length=3),
    "delta-nets": replace(RECIPE, windows=(None, 40), recurrent=("delta",), value_size=16),
}
MOST_DRAFTS = 9
COUNT = 60  # with the prompt, past the window of 40
PROMPT = random_tokens(RECIPE, 9, 5)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, logprobs=2),
    "penalties": SamplingParams(
        temperature=0, repetition_penalty=1.3, frequency_penalty=0.4, dry_multiplier=2.0, dry_allowed_length=1
    ),
    "sampled": SamplingParams(temperature=0.9, top_p=0.9, top_k=30, seed=11, logprobs=1, presence_penalty=0.5),
    "xtc": SamplingParams(temperature=1.2, min_p=0.05, xtc_probability=0.5, xtc_threshold=0.05, seed=4),
    "mirostat": SamplingParams(temperature=1.0, mirostat=2, mirostat_tau=3.0, mirostat_eta=0.3, seed=3),
}


@pytest.fixture(scope="module", params=RECIPES)
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    config = EngineConfig(
        threads=2, max_running=4, max_step_tokens=64, kv_cache_bytes=32 << 20, speculative_tokens=MOST_DRAFTS
    )
    made = Runner(*random_model(RECIPES[request.param]), config)
    yield made
    made.close()


@pytest.mark.parametrize(("runner", "name"), diagonal(RECIPES, SAMPLINGS), indirect=["runner"])
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_same_text_with_any_drafts(runner: Runner, name: str, data: st.DataObject) -> None:
    """Some drafts are what will be sampled, some are wrong at some place; another row runs beside."""
    sampling = SAMPLINGS[name]
    expected, logprobs = plain_decode(runner, 0, PROMPT, sampling, COUNT)
    other, _ = plain_decode(runner, 0, PROMPT[::-1], SAMPLINGS["greedy"], COUNT)
    runner.backend.open(opened_row(2, sampling, PROMPT))
    runner.backend.open(opened_row(1, SAMPLINGS["greedy"], PROMPT[::-1]))
    found: list[int] = []
    found_logprobs = []
    tokens, computed = list(PROMPT), 0
    beside, beside_tokens = [], list(PROMPT[::-1])
    steps = 0
    while len(found) < COUNT:
        size = data.draw(st.integers(0, min(6, COUNT - len(found) - 1)))
        drafts = expected[len(found) : len(found) + size]
        wrong = data.draw(st.integers(0, 2 * size)) if size else 0
        if wrong < size:
            drafts[wrong] = (drafts[wrong] + 1) % RECIPE.vocab_size
        mine = Part(2, tokens, computed, drafts=drafts)
        next_to = Part(1, beside_tokens, len(PROMPT) + len(beside) - len(beside_tokens) if beside else 0)
        output, neighbour = run_step(runner, [mine, next_to])
        accepted = min(wrong, size)
        assert len(output.token_ids) == accepted + 1
        computed += len(tokens) + accepted
        tokens = [output.token_ids[-1]]
        found.extend(output.token_ids)
        found_logprobs.extend(output.logprobs)
        beside_tokens = list(neighbour.token_ids)
        beside.extend(beside_tokens)
        steps += 1
    runner.backend.close(2)
    runner.backend.close(1)
    assert found == expected
    assert found_logprobs == logprobs
    assert beside == other[:steps]


def test_nothing_is_sampled_after_the_end(runner: Runner) -> None:
    """A draft that ends the output is the last token, though drafts after it would be right."""
    expected, _ = plain_decode(runner, 0, PROMPT, SAMPLINGS["greedy"], 8)
    place, end = next((i, t) for i, t in enumerate(expected[1:6], 1) if t not in expected[:i])
    for min_tokens, count in ((0, place + 1), (place, place + 1)):
        sampling = SamplingParams(temperature=0, stop_token_ids=(end,), min_tokens=min_tokens)
        runner.backend.open(opened_row(3, sampling, PROMPT))
        (output,) = run_step(runner, [Part(3, PROMPT, drafts=expected[:7])])
        runner.backend.close(3)
        assert list(output.token_ids) == expected[:count]


def test_queries_come_with_drafts(runner: Runner) -> None:
    expected, _ = plain_decode(runner, 0, PROMPT, SAMPLINGS["greedy"], 4)
    queries = tuple(LogprobQuery(index, PROMPT[index + 1], 1) for index in range(len(PROMPT) - 1))
    runner.backend.open(opened_row(0, SAMPLINGS["greedy"], PROMPT))
    (alone,) = run_step(runner, [Part(0, PROMPT, queries=queries)])
    runner.backend.close(0)
    runner.backend.open(opened_row(0, SAMPLINGS["greedy"], PROMPT))
    (output,) = run_step(runner, [Part(0, PROMPT, drafts=expected[:3], queries=queries)])
    runner.backend.close(0)
    assert output.queried == alone.queried
    assert list(output.token_ids) == expected


def test_all_rows_of_logits_are_used(runner: Runner) -> None:
    """More sampled tokens in a step than rows of logits that exist at once."""
    prompts = {row: random_tokens(RECIPE, 4, row) for row in range(4)}
    texts = {row: plain_decode(runner, 0, prompt, SAMPLINGS["sampled"], 10)[0] for row, prompt in prompts.items()}
    for row, prompt in prompts.items():
        runner.backend.open(opened_row(row, SAMPLINGS["sampled"], prompt))
    outputs = run_step(runner, [Part(row, prompt, drafts=texts[row][:MOST_DRAFTS]) for row, prompt in prompts.items()])
    for row, output in zip(prompts, outputs, strict=True):
        assert list(output.token_ids) == texts[row]
        runner.backend.close(row)
    assert len(list(itertools.chain.from_iterable(texts.values()))) == 40
