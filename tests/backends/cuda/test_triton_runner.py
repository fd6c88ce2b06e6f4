"""The whole GPU backend, its kernels interpreted: logits beside the CPU backend's and the reference, and its seam."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backends.cuda.cuda_runs import GPURunner
from random_models import Recipe, random_model, random_tokens
from realizar.backends.base import ForwardInput
from realizar.batch import FROM_PREVIOUS_STEP, LogprobQuery
from realizar.config import EngineConfig
from realizar.sampling_params import SamplingParams, StructuredOutput
from reference_model import FP8CacheModel, ReferenceModel
from reference_tensors import load_tensors
from step_inputs import opened_row, results_of, scheduled_row, step_input
from wider import wider

SMALL = {
    "head_size": 32,
    "num_heads": 2,
    "num_kv_heads": 1,
    "hidden_size": 64,
    "feed_forward_size": 96,
    "vocab_size": 48,
}
RECIPES = {
    "q8_0-int8": (Recipe(**SMALL, weights="Q8_0", windows=(5,), parts=("qk_norm", "biases")), "int8", 0.02),
    "q4_0-sinks": (
        Recipe(**SMALL, weights="Q4_0", windows=(None,), parts=("sinks", "post_norms", "growth")), "f16", 0.01
    ),
    "iq4_nl-plain": (
        Recipe(**SMALL, weights="IQ4_NL", windows=(None,), activation="gelu",
               parts=("interleaved", "soft_cap", "layer_norm")),
        "bf16",
        0.03,
    ),
    "q4_0-shared": (
        Recipe(**SMALL, weights="Q4_0", windows=(5, None, None), parts=("qk_norm", "post_norms", "output_scale"),
               sources=(None, None, 1), input_size=32, activation="gelu_tanh"),
        "int8",
        0.03,
    ),
    "f32-shared": (
        Recipe(**SMALL, weights="F32", windows=(5, None, 5, None), parts=("qk_norm", "biases"),
               sources=(None, None, 0, 1), input_size=32),
        "auto",
        2e-3,
    ),
    "f32-fp8": (
        Recipe(**SMALL, weights="F32", windows=(5, None, None), parts=("qk_norm", "biases", "sinks"),
               sources=(None, None, 1)),
        "fp8",
        5e-3,
    ),
    "q8_0-lacking": (
        Recipe(**SMALL, weights="Q8_0", windows=(None, None, 5), lacking=("mixer", "feed_forward")), "f16", 0.02
    ),
    "f32-rows": (
        Recipe(**SMALL, weights="F32", windows=(None,), activation="relu_squared",
               parts=("token_norm", "ungated", "partial_rope")),
        "auto",
        2e-3,
    ),
}  # fmt: skip
GREEDY = SamplingParams(temperature=0)


def make_config(kv: str, **options: int) -> EngineConfig:
    return EngineConfig(
        threads=1, max_running=2, max_step_tokens=32, kv_cache_bytes=8 << 20, context_length=64, kv_cache_dtype=kv,  # type: ignore[arg-type]
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", wider(RECIPES, "q8_0-int8", "f32-fp8", "iq4_nl-plain", "q8_0-lacking", "f32-rows"))
def test_logits(name: str) -> None:
    """A chunk, then one token, then two rows of which one is a chunk: as in exact arithmetic."""
    recipe, kv, tolerance = RECIPES[name]
    spec, checkpoint = random_model(recipe)
    runner = GPURunner(spec, checkpoint, make_config(kv))
    ids, others = random_tokens(recipe, 14, 1), random_tokens(recipe, 6, 2)
    first, second = runner.request(0, ids), runner.request(1, others, first=1)
    runner.step([(first, 12)])
    runner.step([(first, 1), (second, 6)])
    runner.step([(first, 1)])
    twin = FP8CacheModel if kv == "fp8" else ReferenceModel
    reference = twin(spec, load_tensors(spec, checkpoint), np.float64)
    for request in (first, second):
        expected = reference.logits(request.token_ids)
        error = np.linalg.norm(request.values() - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        assert error.max() <= tolerance
    runner.close()


@pytest.fixture(scope="module")
def runner() -> Iterator[GPURunner]:
    made = GPURunner(*random_model(RECIPES["q4_0-sinks"][0]), make_config("f16", speculative_tokens=3))
    yield made
    made.close()


def one_row(tokens: Sequence[int], computed: int, **wanted: Any) -> ForwardInput:
    """A step of row 0, whose tokens lie in blocks 0 and 1."""
    row = scheduled_row(0, tokens, computed, **wanted)
    slots = np.arange(computed, row.num_context_tokens, dtype=np.int32)
    return step_input([row], (slots,), (np.array([[0, 1]], np.int32),))


def best(runner: GPURunner) -> list[int]:
    return [int(row.argmax()) for row in runner.backend.logits([0])]


def test_two_steps_in_flight(runner: GPURunner) -> None:
    """The second step takes the first one's token on the device; results come late and more than once."""
    ids = random_tokens(RECIPES["q4_0-sinks"][0], 4, 5)
    runner.backend.open(opened_row(0, GREEDY, ids))
    first = runner.backend.submit(one_row(ids, 0, sample=True))
    second = runner.backend.submit(one_row([FROM_PREVIOUS_STEP], 4, sample=True))
    (token,) = results_of(second.result())[0].token_ids
    (before,) = results_of(first.result())[0].token_ids
    assert first.result() is first.result()
    runner.backend.submit(one_row([*ids, before], 0)).result()
    logits = runner.backend.logits([3, 4]).cpu().numpy()
    assert [before, token] == logits.argmax(axis=-1).tolist()
    runner.backend.close(0)


def test_drafts_give_what_steps_give(runner: GPURunner) -> None:
    """Two of three drafts are right: the step gives three tokens, and the next step continues from the last."""
    ids = random_tokens(RECIPES["q4_0-sinks"][0], 4, 6)
    runner.backend.open(opened_row(0, GREEDY, ids))
    plain = list(results_of(runner.backend.submit(one_row(ids, 0, sample=True)).result())[0].token_ids)
    for computed in (4, 5, 6):
        plain += results_of(runner.backend.submit(one_row(plain[-1:], computed, sample=True)).result())[0].token_ids
    runner.backend.close(0)
    runner.backend.open(opened_row(0, GREEDY, [*ids, plain[0]], 4))
    drafts = (plain[1], plain[2], (plain[3] + 1) % 48)
    step = runner.backend.submit(one_row(plain[:1], 4, sample=True, drafts=drafts))
    assert list(results_of(step.result())[0].token_ids) == plain[1:]
    runner.backend.close(0)


@pytest.mark.parametrize("grammar", [None, StructuredOutput("regex", "a")])
def test_a_step_samples_at_once_unless_a_mask_may_come(runner: GPURunner, grammar: StructuredOutput | None) -> None:
    ids = random_tokens(RECIPES["q4_0-sinks"][0], 5, 7)
    runner.backend.open(opened_row(0, SamplingParams(temperature=0, structured=grammar), ids))
    step = runner.backend.submit(one_row(ids, 0, sample=True))
    assert (step._finished is None) == (grammar is not None)
    assert len(results_of(step.result())[0].token_ids) == 1
    runner.backend.close(0)


def test_masks_queries_and_pooling(runner: GPURunner) -> None:
    ids = random_tokens(RECIPES["q4_0-sinks"][0], 5, 7)
    sampling = SamplingParams(temperature=0, logprobs=2, structured=StructuredOutput("regex", "a"))
    runner.backend.open(opened_row(0, sampling, ids))
    queries = (LogprobQuery(1, ids[2], 2), LogprobQuery(3, None, 0))
    step = runner.backend.submit(one_row(ids, 0, sample=True, logprob_queries=queries, pooling="mean"))
    mask = np.zeros(2, np.uint32)
    mask[0] = 1 << 9 | 1 << 21
    step.set_masks({0: mask})
    (found,) = results_of(step.result())
    logits = runner.backend.logits(range(5)).cpu().numpy().astype(np.float64)
    logprobs = logits - logits.max(axis=1, keepdims=True)
    logprobs -= np.log(np.exp(logprobs).sum(axis=1, keepdims=True))
    assert found.token_ids == (max((9, 21), key=lambda i: logits[4, i]),)
    assert found.logprobs[0].logprob == pytest.approx(logprobs[4, found.token_ids[0]], abs=1e-5)
    assert [i for i, _ in found.logprobs[0].top] == np.argsort(-logits[4])[:2].tolist()
    assert [q.token_id for q in found.queried] == [ids[2], int(logits[3].argmax())]
    assert found.queried[0].logprob == pytest.approx(logprobs[1, ids[2]], abs=1e-5)
    spec = runner.spec
    hidden = ReferenceModel(spec, load_tensors(spec, random_model(RECIPES["q4_0-sinks"][0])[1]), np.float64).hidden(ids)
    assert found.pooled is not None
    np.testing.assert_allclose(found.pooled, hidden.mean(axis=0), atol=0.02)
    runner.backend.close(0)
