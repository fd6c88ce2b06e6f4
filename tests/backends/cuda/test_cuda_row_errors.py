"""Whatever one row of a step raises, or what its logits are, is that row's: the others get what they get alone.

Interpreted that is the same bits. A card takes other tiles for more rows: there it is the same tokens, and
log-probabilities as near as two routes are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backends.cuda.cuda_runs import GPURunner  # noqa: E402
from random_models import Recipe, random_model, random_tokens  # noqa: E402
from realizar.backends.base import ForwardInput  # noqa: E402
from realizar.batch import FROM_PREVIOUS_STEP, LogprobQuery  # noqa: E402
from realizar.config import EngineConfig  # noqa: E402
from realizar.errors import CapacityError  # noqa: E402
from realizar.outputs import RowError  # noqa: E402
from realizar.sampling_params import SamplingParams, StructuredOutput  # noqa: E402
from step_inputs import RowOutput, opened_row, results_of, scheduled_row, step_input  # noqa: E402  # noqa: E402

RECIPE = Recipe(32, 2, 1, hidden_size=64, feed_forward_size=96, vocab_size=48, weights="Q8_0", windows=(None,))
CONFIG = EngineConfig(max_running=4, max_step_tokens=48, context_length=64, kv_cache_dtype="f16")
LENGTHS = (2, 3, 2)
PROMPTS = [random_tokens(RECIPE, length, row) for row, length in enumerate(LENGTHS)]
SAMPLINGS = {
    0: SamplingParams(temperature=0.8, seed=3, logprobs=2, repetition_penalty=1.2),
    1: SamplingParams(temperature=0.9, seed=4, presence_penalty=0.5),
    2: SamplingParams(temperature=0.0),
}
ALL = tuple(range(RECIPE.vocab_size))


@pytest.fixture(scope="module")
def runner() -> Iterator[GPURunner]:
    made = GPURunner(*random_model(RECIPE), CONFIG)
    yield made
    made.close()


def step_of(rows: list[int], **middle: Any) -> ForwardInput:
    """Rows that read their prompts, in blocks of their own; `middle` is what row 1 wants."""
    inputs, slots = [], []
    for row in rows:
        wants = {"sample": True} | (middle if row == 1 else {})
        inputs.append(scheduled_row(row, PROMPTS[row], **wants))
        slots.extend(row * CONFIG.block_size + place for place in range(inputs[-1].num_tokens))
    tables = np.array([[row] for row in rows], np.int32)
    return step_input(inputs, (np.array(slots, np.int32),), (tables,))


def run(
    runner: GPURunner, samplings: dict[int, SamplingParams], masks: dict[int, Any] | None = None, **middle: Any
) -> tuple[RowOutput, ...]:
    backend = runner.backend
    for row, sampling in samplings.items():
        backend.open(opened_row(row, sampling, PROMPTS[row]))
    try:
        step = backend.submit(step_of(list(samplings), **middle))
        step.set_masks(masks or {})
        return results_of(step.result())
    finally:
        for row in samplings:
            backend.close(row)


@pytest.fixture(scope="module")
def alone(runner: GPURunner) -> tuple[RowOutput, ...]:
    """The outputs of rows 0 and 2 where no other row is."""
    return run(runner, {0: SAMPLINGS[0], 2: SAMPLINGS[2]})


def same(found: Sequence[RowOutput], alone: Sequence[RowOutput]) -> None:
    """Compare what the sound rows got."""
    if not torch.cuda.is_available():
        assert tuple(found) == tuple(alone)
        return
    for got, wanted in zip(found, alone, strict=True):
        assert (got.token_ids, got.error) == (wanted.token_ids, None)
        logprobs = [each.logprob for each in wanted.logprobs]
        assert [each.logprob for each in got.logprobs] == pytest.approx(logprobs, abs=0.05)


def expect(
    runner: GPURunner,
    alone: tuple[RowOutput, ...],
    error: RowError,
    sampling: SamplingParams = SAMPLINGS[1],
    **middle: Any,
) -> None:
    """Row 1 fails between two others, which get what they get alone."""
    first, failed, last = run(runner, {**SAMPLINGS, 1: sampling}, **middle)
    assert failed == RowOutput((), error=error)
    same((first, last), alone)


@pytest.mark.parametrize("drafts", [(), (3, 4)], ids=["", "drafts"])
def test_every_id_forbidden(runner: GPURunner, alone: tuple[RowOutput, ...], drafts: tuple[int, ...]) -> None:
    sampling = SamplingParams(temperature=0.0, min_tokens=1, stop_token_ids=ALL, logprobs=1)
    reason = "no token can be sampled: every one ends the output, before min_tokens"
    expect(runner, alone, RowError(reason, "request", "min_tokens"), sampling, drafts=drafts)


def test_a_mask_that_allows_nothing(runner: GPURunner, alone: tuple[RowOutput, ...]) -> None:
    masks = {1: np.zeros(-(-RECIPE.vocab_size // 32), np.uint32)}
    reason = "no token can be sampled: the grammar and min_tokens allow none"
    sampling = replace(SAMPLINGS[1], structured=StructuredOutput("regex", "a"))
    expect(runner, alone, RowError(reason, "request", "structured"), sampling, masks=masks)


@pytest.mark.parametrize(
    ("wants", "value"),
    [
        ("greedy", np.nan),
        ("drawn", np.nan),
        ("drawn", np.inf),
        ("drawn", -np.inf),
        ("query", np.nan),
        ("query", np.inf),
    ],
)
def test_logits_that_are_not_finite(
    runner: GPURunner, alone: tuple[RowOutput, ...], monkeypatch: pytest.MonkeyPatch, wants: str, value: float
) -> None:
    """Written over those of row 1's last token once the body has run, and the token sampled again from them."""
    backend, sampling = runner.backend, SAMPLINGS[1] if wants == "drawn" else SAMPLINGS[2]
    middle: dict[str, Any] = {}
    if wants == "query":
        middle = {"sample": False, "logprob_queries": (LogprobQuery(1, 5, 3),)}
    place = 2 if wants == "query" else 1  # sampled tokens of all rows come before queries
    with monkeypatch.context() as patched:
        honest = backend.model.graphs.run
        patched.setattr(backend.model.graphs, "run", lambda shape, selected: (honest(shape, selected), spoil()))

        def spoil() -> None:
            backend.model.space.logits[place] = value
            if wants == "greedy":
                backend.model.space.sampled[place] = -1  # as `choose` has it, see the test of the kernel

        first, failed, last = run(runner, {**SAMPLINGS, 1: sampling}, **middle)
    reason = "no token can be sampled: the model gave a logit that is not finite"
    query = "the model's logits are not usable: their maximum is not finite"
    assert failed == RowOutput((), error=RowError(query if wants == "query" else reason))
    same((first, last), alone)


def test_a_device_without_memory_is_not_one_rows(runner: GPURunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runner.backend.model.finisher, "final_states", hidden)
    with pytest.raises(CapacityError):
        run(runner, {**SAMPLINGS, 1: SamplingParams()}, sample=False, pooling="last")


@pytest.mark.parametrize(("pooling", "fault"), [("last", "nan"), ("mean", "raises")])
def test_pooling(
    runner: GPURunner, alone: tuple[RowOutput, ...], monkeypatch: pytest.MonkeyPatch, pooling: str, fault: str
) -> None:
    finisher = runner.backend.model.finisher
    honest = finisher.final_states

    def hidden(tokens: Sequence[int]) -> Iterator[Any]:
        if fault == "raises":
            raise ValueError("a bug")
        return (states * float("nan") for states in honest(tokens))

    monkeypatch.setattr(finisher, "final_states", hidden)
    bug, nan = "the request's pooling failed: ValueError", "the model gave a hidden state that is not finite"
    expect(runner, alone, RowError(bug if fault == "raises" else nan), SamplingParams(), sample=False, pooling=pooling)


def test_the_next_step_runs_after_a_row_without_a_choice(runner: GPURunner) -> None:
    """The failed row's token of the next step is an id of the vocabulary, and its neighbours' tokens are as ever."""
    broken = SamplingParams(min_tokens=1, stop_token_ids=ALL)
    found = two_steps(runner, {**SAMPLINGS, 1: broken})
    same(found, two_steps(runner, {0: SAMPLINGS[0], 2: SAMPLINGS[2]}))


def two_steps(runner: GPURunner, samplings: dict[int, SamplingParams]) -> list[RowOutput]:
    """The outputs of the second step for the rows other than row 1."""
    backend, rows = runner.backend, list(samplings)
    for row, sampling in samplings.items():
        backend.open(opened_row(row, sampling, PROMPTS[row]))
    backend.submit(step_of(rows))
    places = np.array([LENGTHS[row] for row in rows], np.int32)
    inputs = [scheduled_row(row, (FROM_PREVIOUS_STEP,), LENGTHS[row], True) for row in rows]
    slots = np.array(rows, np.int32) * CONFIG.block_size + places
    tables = np.array([[row] for row in rows], np.int32)
    found = results_of(backend.submit(step_input(inputs, (slots,), (tables,))).result())
    for row in rows:
        backend.close(row)
    return [output for row, output in zip(rows, found, strict=True) if row != 1]
