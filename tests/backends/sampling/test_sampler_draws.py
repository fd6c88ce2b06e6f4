"""Statistics of many draws: goodness of fit, seeds, XTC's probability, mirostat's target. All seeds are fixed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.sampler_twin import normal_deviate_of_chi_square
from realizar.sampling_params import SamplingParams
from step_inputs import opened_row

VOCAB = 30
DRAWS = 4_000


def logits(seed: int, size: int = VOCAB) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 1.5, size).astype(np.float32)


def tally(sampler: Any, row: NDArray[np.float32], draws: int = DRAWS) -> dict[int, int]:
    counts: dict[int, int] = {}
    for position in range(draws):
        token_id = sampler.sample(row, position).token_id
        counts[token_id] = counts.get(token_id, 0) + 1
    return counts


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 3.0},
        {"top_n_sigma": 1.0},
        {"top_k": 7},
        {"typical_p": 0.7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"xtc_probability": 1.0, "xtc_threshold": 0.05},
        {"temperature": 1.4, "top_n_sigma": 2.5, "top_k": 20, "typical_p": 0.95, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_draws_fit_the_twins_distribution(new_sampler: Any, options: dict[str, Any], twin: Any) -> None:
    row = logits(3)
    sampling = SamplingParams(seed=11, **options)
    distribution = twin().distribution(sampling, row.tolist(), sampling.xtc_probability == 1.0)
    counts = tally(new_sampler(opened_row(0, sampling, [], 0), VOCAB), row)
    assert counts.keys() <= distribution.keys()
    assert abs(normal_deviate_of_chi_square(counts, {i: DRAWS * p for i, p in distribution.items()})) < 3.3


def test_draws_fit_after_bias_penalties_and_mask(new_sampler: Any, twin: Any) -> None:
    row = logits(4)
    sampling = SamplingParams(
        seed=12, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, dry_multiplier=0.5,
        logit_bias={2: 1.5, 9: -100.0},
    )  # fmt: skip
    prompt, output = [1, 2, 3, 4, 5], [6, 7, 1, 2, 3]
    allowed = set(range(0, VOCAB, 2)) | {4, 9, 11}
    mask = np.array([sum(1 << i for i in allowed)], np.uint32)
    distribution = twin().distribution(sampling, twin().adjust(sampling, row.tolist(), prompt, output, allowed), False)
    sampler = new_sampler(opened_row(0, sampling, prompt + output, len(prompt)), VOCAB)
    counts: dict[int, int] = {}
    for position in range(DRAWS):
        token_id = sampler.sample(row, position, mask).token_id
        counts[token_id] = counts.get(token_id, 0) + 1
    assert counts.keys() <= allowed - {9}
    assert abs(normal_deviate_of_chi_square(counts, {i: DRAWS * p for i, p in distribution.items()})) < 3.3


def test_xtc_acts_with_its_probability(new_sampler: Any, twin: Any) -> None:
    row = logits(3)
    sampling = SamplingParams(seed=13, xtc_probability=0.3, xtc_threshold=0.08)
    distributions = [twin().distribution(sampling, row.tolist(), acts) for acts in (False, True)]
    assert len(distributions[1]) < len(distributions[0])
    expected = {i: DRAWS * (0.7 * p + 0.3 * distributions[1].get(i, 0.0)) for i, p in distributions[0].items()}
    counts = tally(new_sampler(opened_row(0, sampling, [], 0), VOCAB), row)
    assert abs(normal_deviate_of_chi_square(counts, expected)) < 3.3


def test_draws_of_a_large_vocabulary_fit(new_sampler: Any, twin: Any) -> None:
    row = logits(6, 20_000)
    distribution = twin().distribution(SamplingParams(), row.tolist(), False)
    groups = {i: i // 1_000 for i in distribution}
    expected = dict.fromkeys(range(20), 0.0)
    for token_id, probability in distribution.items():
        expected[groups[token_id]] += 3_000 * probability
    counts: dict[int, int] = {}
    for token_id, count in tally(
        new_sampler(opened_row(0, SamplingParams(seed=2), [], 0), row.size), row, 3_000
    ).items():
        counts[groups[token_id]] = counts.get(groups[token_id], 0) + count
    assert abs(normal_deviate_of_chi_square(counts, expected)) < 3.3


def run(sampler: Any, start: int, steps: int) -> list[int]:
    """Tokens of a row whose logits depend on its last token."""
    tokens = [start]
    for position in range(1, steps + 1):
        tokens.append(sampler.sample(logits(100 + tokens[-1]), position).token_id)
        sampler.accept(tokens[-1])
    return tokens[1:]


ALL = SamplingParams(
    seed=21, temperature=1.2, top_p=0.95, xtc_probability=0.5, repetition_penalty=1.1, frequency_penalty=0.1,
    dry_multiplier=0.8, typical_p=0.97,
)  # fmt: skip


def test_same_seed_same_tokens_whatever_other_rows_do(new_sampler: Any) -> None:
    alone = run(new_sampler(opened_row(0, ALL, [0], 1), VOCAB), 0, 60)
    samplers = [
        new_sampler(opened_row(0, ALL, [0], 1), VOCAB),
        new_sampler(opened_row(0, SamplingParams(), [5], 1), VOCAB),
    ]
    tokens = [[0], [5]]
    for position in range(1, 61):
        for sampler, row in zip(samplers, tokens, strict=True):
            row.append(sampler.sample(logits(100 + row[-1]), position).token_id)
            sampler.accept(row[-1])
    assert tokens[0][1:] == alone
    assert run(new_sampler(opened_row(0, ALL, [0], 1, 1), VOCAB), 0, 60) != alone  # another choice of the same request


def test_a_row_rebuilt_from_its_history_continues_as_it_was(new_sampler: Any) -> None:
    whole = run(new_sampler(opened_row(0, ALL, [3, 0], 2), VOCAB), 0, 60)
    for cut in (1, 17, 40):
        rebuilt = new_sampler(opened_row(0, ALL, [3, 0, *whole[:cut]], 2), VOCAB)
        tokens = whole[:cut]
        for position in range(cut + 1, 61):
            tokens.append(rebuilt.sample(logits(100 + tokens[-1]), position).token_id)
            rebuilt.accept(tokens[-1])
        assert tokens == whole


def test_mirostat_equals_its_definition(new_sampler: Any, twin: Any) -> None:
    sampling = SamplingParams(seed=31, temperature=1.1, mirostat=2, mirostat_tau=2.0, mirostat_eta=0.3, top_k=1)
    sampler = new_sampler(opened_row(0, sampling, [], 0), VOCAB)
    limit = 4.0
    for position in range(300):
        row = logits(position)
        scaled = {i: float(value) / 1.1 for i, value in enumerate(row)}
        probabilities = twin().softmax(scaled)
        kept = {i for i, p in probabilities.items() if -math.log2(p) <= limit} or {int(row.argmax())}
        narrowed = twin().softmax({i: scaled[i] for i in kept})
        assert sampler.mirostat_mu == pytest.approx(limit, abs=1e-6)
        token_id = sampler.sample(row, position).token_id
        assert token_id in kept
        limit -= 0.3 * (-math.log2(narrowed[token_id]) - 2.0)
        sampler.accept(token_id)


@pytest.mark.parametrize("tau", [1.0, 2.5, 4.0])
def test_mirostat_settles_at_its_target_surprise(new_sampler: Any, tau: float) -> None:
    size = 400
    sampling = SamplingParams(seed=32, mirostat=2, mirostat_tau=tau, mirostat_eta=0.1)
    sampler = new_sampler(opened_row(0, sampling, [], 0), size)
    surprises = []
    for position in range(3_000):
        row = logits(position % 50, size)
        before = sampler.mirostat_mu
        sampler.accept(sampler.sample(row, position).token_id)
        surprises.append(tau + (before - sampler.mirostat_mu) / 0.1)
    assert np.mean(surprises[300:]) == pytest.approx(tau, abs=0.05)


def test_mirostat_learns_nothing_from_a_token_it_did_not_choose(new_sampler: Any) -> None:
    sampler = new_sampler(opened_row(0, SamplingParams(seed=33, mirostat=2, mirostat_tau=2.0), [0], 1), VOCAB)
    row = logits(5)
    sampler.accept(sampler.sample(row, 1).token_id + 1)
    assert sampler.mirostat_mu == 4.0
    sampler.accept(sampler.sample(row, 2).token_id)
    assert sampler.mirostat_mu != 4.0
