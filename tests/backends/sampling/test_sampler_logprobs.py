"""Log-probabilities against a float64 log-softmax, their order and their independence of sampling parameters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from backends.reference_sampler.logprobs import token_logprobs
from realizar.errors import RealizarError
from realizar.outputs import TokenLogprobs
from realizar.sampling_params import SamplingParams
from step_inputs import opened_row

VALUES = st.one_of(
    st.floats(-50, 50, width=32), st.integers(-2, 2).map(float), st.sampled_from([-math.inf, -3e38, 1e30])
)


@given(st.lists(VALUES, min_size=1, max_size=50), st.integers(0, 49), st.integers(0, 60))
def test_equal_to_a_float64_log_softmax(logprobs_of: Any, row: list[float], token_id: int, top_n: int) -> None:
    assume(max(row) > -math.inf)
    token_id %= len(row)
    logits = np.array(row, np.float32)
    values = [float(value) for value in logits]
    normaliser = max(values) + math.log(math.fsum(math.exp(value - max(values)) for value in values))
    ranked = sorted(range(len(row)), key=lambda i: (-values[i], i))
    result = logprobs_of(logits, token_id, top_n)
    assert result.token_id == token_id
    assert result.rank == ranked.index(token_id) + 1
    assert result.logprob == pytest.approx(values[token_id] - normaliser, rel=1e-6, abs=1e-6)
    assert [i for i, _ in result.top] == ranked[:top_n]
    for i, logprob in result.top:
        assert logprob == pytest.approx(values[i] - normaliser, rel=1e-6, abs=1e-6)
        assert i != token_id or logprob == result.logprob  # exactly: callers compare them for equality
    assert logprobs_of(logits, None, top_n).token_id == ranked[0]


@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 30.0])
def test_probabilities_of_a_large_vocabulary_sum_to_1(logprobs_of: Any, spread: float) -> None:
    logits = np.random.default_rng(1).normal(-7, spread, 262_144).astype(np.float32)
    result = logprobs_of(logits, 5, logits.size)
    assert math.fsum(math.exp(logprob) for _, logprob in result.top) == pytest.approx(1.0, abs=2e-6)
    assert dict(result.top)[5] == result.logprob
    assert result.top[result.rank - 1][0] == 5


def assert_alike(found: TokenLogprobs, wanted: TokenLogprobs) -> None:
    assert (found.token_id, found.rank) == (wanted.token_id, wanted.rank)
    assert found.logprob == pytest.approx(wanted.logprob, abs=1e-6)
    assert [i for i, _ in found.top] == [i for i, _ in wanted.top]
    assert [value for _, value in found.top] == pytest.approx([value for _, value in wanted.top], abs=1e-6)


def test_samples_report_the_models_own_distribution(new_sampler: Any) -> None:
    logits = np.random.default_rng(2).normal(0, 2, 100).astype(np.float32)
    sampling = SamplingParams(
        seed=3, temperature=0.3, top_k=5, logprobs=4, repetition_penalty=2.0, logit_bias={7: 50.0}
    )
    sampled = new_sampler(opened_row(0, sampling, [7], 1), 100).sample(logits, 1)
    assert sampled.token_id == 7
    assert_alike(sampled.logprobs, token_logprobs(logits, 7, 4))
    its_own = new_sampler(opened_row(0, SamplingParams(temperature=0, logprobs=0), [], 0), 100).sample(logits, 0)
    assert_alike(its_own.logprobs, token_logprobs(logits, int(logits.argmax()), 0))
    assert new_sampler(opened_row(0, SamplingParams(temperature=0), [], 0), 100).sample(logits, 0).logprobs is None


@pytest.mark.parametrize("row", [[0.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_unusable_logits_are_an_error(logprobs_of: Any, row: list[float]) -> None:
    with pytest.raises(RealizarError, match="not usable"):
        logprobs_of(np.array(row, np.float32), 0, 1)
