"""Bias, penalties, DRY, masks and minimum length against the twin, and state rebuilt from history."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from realizar.errors import RealizarError
from realizar.sampling_params import SamplingParams
from step_inputs import opened_row

VOCAB = 40
LOGITS = st.lists(
    st.one_of(st.floats(-20, 20, width=32), st.sampled_from([0.0, -math.inf, 3e38, -3e38])),
    min_size=VOCAB,
    max_size=VOCAB,
)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=30)
FEW_TOKENS = st.lists(st.integers(0, 3), max_size=60)


def packed(allowed: set[int], size: int) -> NDArray[np.uint32]:
    words = np.zeros((size + 31) // 32, np.uint32)
    for token_id in allowed:
        words[token_id // 32] |= np.uint32(1) << np.uint32(token_id % 32)
    return words


def adjusted(sampler: Any, logits: list[float], mask: NDArray[np.uint32] | None = None) -> NDArray[np.float32]:
    row = np.array(logits, np.float32)
    before = row.copy()
    result = sampler.adjusted(row, mask)
    assert np.array_equal(row, before)
    return result


@given(
    LOGITS,
    TOKENS,
    TOKENS,
    st.fixed_dictionaries(
        {},
        optional={
            "repetition_penalty": st.floats(0.1, 10),
            "presence_penalty": st.floats(-2, 2),
            "frequency_penalty": st.floats(-2, 2),
            "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=5),
            "dry_multiplier": st.floats(0.1, 3),
            "dry_allowed_length": st.integers(1, 3),
        },
    ),
    st.none() | st.sets(st.integers(0, VOCAB - 1)),
)
def test_adjusted_logits_equal_twin(
    new_sampler: Any,
    twin: Any,
    logits: list[float],
    prompt: list[int],
    output: list[int],
    options: dict[str, Any],
    allowed: set[int] | None,
) -> None:
    sampling = SamplingParams(**options)
    expected = twin().adjust(sampling, logits, prompt, output, allowed)
    mask = None if allowed is None else packed(allowed, VOCAB)
    result = adjusted(new_sampler(opened_row(0, sampling, [*prompt, *output], len(prompt)), VOCAB), logits, mask)
    np.testing.assert_allclose(result, np.array(expected), rtol=2e-7, atol=1e-30)
    continued = new_sampler(opened_row(0, sampling, prompt, len(prompt)), VOCAB)
    for token_id in output:
        continued.accept(token_id)
    assert np.array_equal(adjusted(continued, logits, mask), result)


def test_repetition_sees_the_prompt_and_presence_and_frequency_do_not(new_sampler: Any) -> None:
    row = [2.0, -2.0, 2.0, -2.0, 1.0]
    repetition = new_sampler(opened_row(0, SamplingParams(repetition_penalty=2.0), [0, 1, 1, 2, 2, 3], 3), 5)
    assert adjusted(repetition, row).tolist() == [1.0, -4.0, 1.0, -4.0, 1.0]
    counted = new_sampler(
        opened_row(0, SamplingParams(presence_penalty=1.0, frequency_penalty=0.25), [0, 1, 1, 2, 2, 3], 3), 5
    )
    assert adjusted(counted, row).tolist() == [2.0, -2.0, 0.5, -3.25, 1.0]


def test_ids_outside_the_vocabulary_in_the_history_are_no_tokens(new_sampler: Any) -> None:
    sampling = SamplingParams(repetition_penalty=2.0, dry_multiplier=1.0, dry_allowed_length=1)
    sampler = new_sampler(opened_row(0, sampling, [-1, 7, -1, -1, 9, 7], 4), 3)
    assert adjusted(sampler, [1.0, 1.0, 1.0]).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_bias_of_100_forces_and_of_minus_100_bans(new_sampler: Any, temperature: float) -> None:
    row = np.random.default_rng(0).normal(0, 4, 500).astype(np.float32)
    best = int(row.argmax())
    forced = new_sampler(
        opened_row(0, SamplingParams(temperature=temperature, seed=1, logit_bias={17: 100.0}), [], 0), 500
    )
    banned = new_sampler(
        opened_row(0, SamplingParams(temperature=temperature, seed=1, logit_bias={best: -100.0}), [], 0), 500
    )
    for position in range(100):
        assert forced.sample(row, position).token_id == 17
        assert banned.sample(row, position).token_id != best


@given(FEW_TOKENS, FEW_TOKENS, st.sampled_from([-1, -1, 0, 1, 2, 7, 20]), st.sets(st.integers(0, 3), max_size=2))
def test_dry_matches_equal_brute_force(
    new_sampler: Any, twin: Any, prompt: list[int], output: list[int], window: int, breakers: set[int]
) -> None:
    sampling = SamplingParams(
        dry_multiplier=1.0,
        dry_base=2.0,
        dry_allowed_length=1,
        dry_penalty_last_n=window,
        dry_sequence_breakers=tuple(breakers),
    )
    continued = new_sampler(opened_row(0, sampling, prompt), 4)
    for end in range(len(output) + 1):
        for sampler in (continued, new_sampler(opened_row(0, sampling, [*prompt, *output[:end]]), 4)):
            penalties = adjusted(sampler, [0.0] * 4).tolist()
            got = {i: int(math.log2(-value)) + 1 for i, value in enumerate(penalties) if value}
            matches = twin().dry_matches(sampling, [*prompt, *output[:end]])
            assert got == {i: length for i, length in matches.items() if length >= 1}
        if end < len(output):
            continued.accept(output[end])


def test_dry_on_a_long_repetition_stays_finite_and_fast(new_sampler: Any) -> None:
    sampling = SamplingParams(temperature=0, dry_multiplier=1.0, dry_base=100.0)
    sampler = new_sampler(opened_row(0, sampling, [1, 2] * 20_000, 40_000), 3)
    row = adjusted(sampler, [0.0, 5.0, 5.0])
    assert row.tolist() == [0.0, float(-np.finfo(np.float32).max), 5.0]
    assert sampler.sample(np.array([0.0, 5.0, -9.0], np.float32), 40_000).token_id == 0


def test_mask_of_a_vocabulary_that_does_not_fill_its_last_word(new_sampler: Any) -> None:
    row = np.arange(70, dtype=np.float32)
    sampler = new_sampler(opened_row(0, SamplingParams(temperature=0), [], 0), 70)
    assert sampler.sample(row, 0, packed({0, 31, 32, 63, 64, 69}, 70)).token_id == 69
    assert sampler.sample(row, 0, packed({0, 31, 32}, 70)).token_id == 32
    with pytest.raises(RealizarError, match="allow none"):
        sampler.sample(row, 0, packed(set(), 70))


def test_end_ids_wait_for_the_minimum_length(new_sampler: Any) -> None:
    sampling = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(3, 4, 99))
    sampler = new_sampler(opened_row(0, sampling, [0, 0], 2), 6)
    row = np.array([0, 0, 1, 3, 4, 2], np.float32)
    for _ in range(2):
        assert sampler.sample(row, 0).token_id == 5
        assert sampler.sample(row, 0, packed({2, 3, 4}, 6)).token_id == 2
        assert sampler.sample(row, 0, packed({3, 4}, 6)).token_id == 4  # a finished grammar outranks the minimum
        sampler.accept(5)
    assert sampler.sample(row, 0).token_id == 4
    assert new_sampler(opened_row(0, sampling, [0, 0, 5, 5], 2), 6).sample(row, 0).token_id == 4
    assert new_sampler(opened_row(0, sampling, [0, 0, 5], 2), 6).sample(row, 0).token_id == 5
