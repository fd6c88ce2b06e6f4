"""Whatever one row of a step raises is that row's: the others get what they get alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from backends.cpu.cpu_rows import Part, mask_of, run_step
from cpu_runs import Runner
from random_models import Recipe, random_model, random_tokens
from realizar.backends.cpu.runner import MeanPool
from realizar.batch import LogprobQuery
from realizar.config import EngineConfig
from realizar.outputs import RowError
from realizar.sampling_params import SamplingParams
from step_inputs import RowOutput, opened_row, results_of

RECIPE = Recipe(vocab_size=96)
PROMPTS = {row: random_tokens(RECIPE, 9 + row, row) for row in range(3)}
SAMPLINGS = {
    0: SamplingParams(temperature=0.8, seed=3, logprobs=2, repetition_penalty=1.2),
    1: SamplingParams(temperature=0.9, seed=4, mirostat=2, presence_penalty=0.5, dry_multiplier=1.0, logprobs=1),
    2: SamplingParams(temperature=0.0, dry_multiplier=1.0),
}
ALL = tuple(range(RECIPE.vocab_size))


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    config = EngineConfig(threads=1, max_running=4, max_step_tokens=96, kv_cache_bytes=32 << 20)
    made = Runner(*random_model(RECIPE), config)
    yield made
    made.close()


def run(runner: Runner, samplings: dict[int, SamplingParams], **middle: Any) -> tuple[RowOutput, ...]:
    """One step of rows that read their prompts and choose; `middle` is what row 1's part has besides."""
    for row, sampling in samplings.items():
        runner.backend.open(opened_row(row, sampling, PROMPTS[row]))
    masks = middle.pop("masks", None)
    try:
        parts = [Part(row, PROMPTS[row], **(middle if row == 1 else {})) for row in samplings]
        return run_step(runner, parts, masks=masks)
    finally:
        for row in samplings:
            runner.backend.close(row)


def expect(runner: Runner, error: RowError, sampling: SamplingParams = SAMPLINGS[1], **middle: Any) -> None:
    """Row 1 fails so between two others, which get what they get without it."""
    first, failed, last = run(runner, {**SAMPLINGS, 1: sampling}, **middle)
    assert failed == RowOutput((), error=error)
    assert (first, last) == run(runner, {0: SAMPLINGS[0], 2: SAMPLINGS[2]})


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("logprobs", [None, 0])
def test_every_id_forbidden(runner: Runner, logprobs: int | None) -> None:
    sampling = SamplingParams(temperature=0.0, min_tokens=1, stop_token_ids=ALL, logprobs=logprobs)
    reason = "no token can be sampled: every one ends the output, before min_tokens"
    expect(runner, RowError(reason, "request", "min_tokens"), sampling)


def test_a_mask_that_allows_nothing(runner: Runner) -> None:
    masks = {1: mask_of((), RECIPE.vocab_size)}
    reason = "no token can be sampled: the grammar and min_tokens allow none"
    expect(runner, RowError(reason, "request", "structured"), masks=masks)


def test_pooling(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MeanPool, "add", failing(RuntimeError("a mean of nothing")))
    error = RowError("the request's pooling failed: RuntimeError")
    expect(runner, error, SamplingParams(), sample=False, pooling="mean")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("wants", ["sampled", "query"])
def test_logits_that_are_not_finite(runner: Runner, monkeypatch: pytest.MonkeyPatch, wants: str, value: float) -> None:
    """One row's: of the three whose logits are read, those of sampled tokens before those of queries."""
    honest = runner.backend.logits
    query = LogprobQuery(3, 5, 2)

    def broken(tokens: list[int]) -> np.ndarray:
        logits = honest(tokens)
        if len(tokens) > 2:
            logits[1 if wants == "sampled" else 2] = value
        return logits

    monkeypatch.setattr(runner.backend, "logits", broken)
    if wants == "sampled":
        expect(runner, RowError("no token can be sampled: the model gave a logit that is not finite"))
    else:
        error = RowError("the model's logits are not usable: their maximum is not finite")
        expect(runner, error, SamplingParams(), sample=False, queries=(query,))


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_hidden_state_that_is_not_finite(runner: Runner, monkeypatch: pytest.MonkeyPatch, pooling: str) -> None:
    honest = runner.backend.hidden_states
    monkeypatch.setattr(runner.backend, "hidden_states", lambda tokens: honest(tokens) * np.float32(np.nan))
    error = RowError("the model gave a hidden state that is not finite")
    expect(runner, error, SamplingParams(), sample=False, pooling=pooling)


def test_a_step_that_follows_a_row_without_a_token(runner: Runner) -> None:
    """With two steps in flight, the next is submitted before the fault is known; its other rows are unharmed."""
    from backends.cpu.cpu_rows import forward_input
    from realizar.batch import FROM_PREVIOUS_STEP

    def two_steps(samplings: dict[int, SamplingParams]) -> list[tuple[RowOutput, ...]]:
        for row, sampling in samplings.items():
            runner.backend.open(opened_row(row, sampling, PROMPTS[row]))
        first = runner.backend.submit(forward_input(runner, [Part(row, PROMPTS[row]) for row in samplings], 6))
        parts = [Part(row, [FROM_PREVIOUS_STEP], len(PROMPTS[row])) for row in samplings]
        second = runner.backend.submit(forward_input(runner, parts, 6))
        found = [results_of(first.result()), results_of(second.result())]
        for row in samplings:
            runner.backend.close(row)
        return found

    broken = SamplingParams(min_tokens=1, stop_token_ids=ALL)
    mixed = two_steps({0: SAMPLINGS[0], 1: broken, 2: SAMPLINGS[2]})
    assert all(rows[1].error is not None for rows in mixed[:1])
    assert [(rows[0], rows[2]) for rows in mixed] == [
        tuple(rows) for rows in two_steps({0: SAMPLINGS[0], 2: SAMPLINGS[2]})
    ]
