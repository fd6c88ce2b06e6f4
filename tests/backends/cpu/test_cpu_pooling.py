"""Pooled hidden states against the numpy twin of the model, in any chunks and beside rows that generate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import pytest

from backends.cpu.cpu_rows import Part, plain_decode, run_step
from cpu_runs import Runner
from random_models import Recipe, random_model, random_tokens
from realizar.config import EngineConfig
from realizar.outputs import RowError
from realizar.sampling_params import SamplingParams
from reference_model import ReferenceModel
from reference_tensors import load_tensors
from step_inputs import opened_row

RECIPE = Recipe(weights="F32", parts=("post_norms",))
IDS = random_tokens(RECIPE, 77, 2)  # past the window, and past the rows of logits that exist at once
GREEDY = SamplingParams(temperature=0)
NOTHING = SamplingParams()


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    config = EngineConfig(threads=1, max_running=4, max_step_tokens=128, kv_cache_bytes=32 << 20)
    made = Runner(*random_model(RECIPE), config)
    yield made
    made.close()


@pytest.fixture(scope="module")
def hidden() -> np.ndarray:
    spec, checkpoint = random_model(RECIPE)
    return ReferenceModel(spec, load_tensors(spec, checkpoint), np.float64).hidden(IDS)


def pooled(
    runner: Runner, pooling: Literal["last", "mean"], chunks: list[int], *beside: Part, row: int = 0
) -> np.ndarray:
    runner.backend.open(opened_row(row, NOTHING, IDS))
    computed, vector = 0, None
    for chunk in chunks:
        part = Part(row, IDS[computed : computed + chunk], computed, sample=False, pooling=pooling)
        vector = run_step(runner, [part, *beside])[0].pooled
        computed += chunk
    assert computed == len(IDS)
    runner.backend.close(row)
    assert vector is not None
    assert vector.dtype == np.float32
    return vector.copy()


def test_last_token(runner: Runner, hidden: np.ndarray) -> None:
    np.testing.assert_allclose(pooled(runner, "last", [77]), hidden[-1], rtol=2e-4, atol=2e-4)


def test_mean(runner: Runner, hidden: np.ndarray) -> None:
    np.testing.assert_allclose(pooled(runner, "mean", [77]), hidden.mean(axis=0), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_chunks_and_neighbours_change_no_bit(runner: Runner, pooling: Literal["last", "mean"]) -> None:
    whole = pooled(runner, pooling, [77])
    runner.backend.open(opened_row(1, GREEDY, IDS[:20]))
    for chunks in ([1, 76], [33, 33, 11], [5] * 15 + [2]):
        found = pooled(runner, pooling, chunks, Part(1, IDS[:20]), row=2)
        assert (found.view(np.uint32) == whole.view(np.uint32)).all()
    runner.backend.close(1)


def test_a_mean_starts_again_after_preemption_and_in_a_new_row(runner: Runner) -> None:
    whole = pooled(runner, "mean", [77], row=3)
    runner.backend.open(opened_row(3, NOTHING, IDS))
    run_step(runner, [Part(3, IDS[:30], 0, sample=False, pooling="mean")])
    (again,) = run_step(runner, [Part(3, IDS, 0, sample=False, pooling="mean")])
    runner.backend.close(3)
    assert again.pooled is not None
    assert (again.pooled == whole).all()


def test_a_mean_of_tokens_that_were_not_seen_is_refused() -> None:
    config = EngineConfig(threads=1, max_running=4, max_step_tokens=128, kv_cache_bytes=32 << 20)
    runner = Runner(*random_model(RECIPE), config)
    runner.backend.open(opened_row(3, NOTHING, IDS))
    (refused,) = run_step(runner, [Part(3, IDS[32:], 32, sample=False, pooling="mean")])
    assert refused.pooled is None
    assert refused.error == RowError("the request's pooling failed: RuntimeError")
    runner.close()


def test_rows_beside_a_pooled_one_generate_as_alone(runner: Runner) -> None:
    expected, _ = plain_decode(runner, 0, IDS[:20], GREEDY, 1)
    runner.backend.open(opened_row(0, GREEDY, IDS[:20]))
    runner.backend.open(opened_row(1, NOTHING, IDS))
    first, second = run_step(runner, [Part(0, IDS[:20]), Part(1, IDS[:40], sample=False, pooling="mean")])
    runner.backend.close(0)
    runner.backend.close(1)
    assert list(first.token_ids) == expected
    assert first.pooled is None
    assert second.token_ids == ()
