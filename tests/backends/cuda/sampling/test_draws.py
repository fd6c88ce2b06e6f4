"""20,000 draws of every sampler on a GPU have the distribution of the float64 twin, by chi-square."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")

from backends.cuda.sampling.sampled_steps import SampledSteps  # noqa: E402
from backends.sampler_twin import SamplerTwin, normal_deviate_of_chi_square  # noqa: E402
from realizar.sampling_params import SamplingParams  # noqa: E402
from step_inputs import scheduled_row  # noqa: E402

VOCAB, ROWS, STEPS = 3000, 256, 79
PROMPT, OUTPUT = [3, 7, 90, 11, 3, 7], [5, 8, 3, 7]  # 90 and 5 would repeat what followed 3, 7
KINDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 60.0},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 40},
    "top_k_large": {"top_k": 700},
    "top_p": {"top_p": 0.9},
    "top_p_hot": {"top_p": 0.95, "temperature": 20.0},
    "min_p": {"min_p": 0.02},
    "typical": {"typical_p": 0.6},
    "typical_top_p": {"temperature": 0.8, "typical_p": 0.95, "top_p": 0.8, "min_p": 0.001},
    "sigma": {"top_n_sigma": 1.3},
    "xtc": {"xtc_probability": 0.6, "xtc_threshold": 0.01},
    "xtc_always": {"xtc_probability": 1.0, "xtc_threshold": 0.03, "top_k": 30},
    "mirostat": {"mirostat": 2, "mirostat_tau": 3.0},
    "mirostat_hot": {"mirostat": 2, "mirostat_tau": 4.5, "temperature": 2.0},
    "usual": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    "all_truncations": {"top_k": 300, "top_n_sigma": 3.0, "typical_p": 0.9, "top_p": 0.9, "min_p": 0.01,
                        "xtc_probability": 0.5, "xtc_threshold": 0.02},
    "repetition": {"repetition_penalty": 1.3},
    "presence_and_frequency": {"temperature": 0.9, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "bias": {"temperature": 0.9, "logit_bias": {3: 2.0, 7: -100.0, 90: 1.5, 2999: 4.0}},
    "dry": {"dry_multiplier": 1.5, "dry_allowed_length": 1},
    "dry_breakers": {"dry_multiplier": 1.5, "dry_allowed_length": 1, "dry_sequence_breakers": (3,)},
    "all_adjustments": {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.2, "presence_penalty": 0.4,
                        "frequency_penalty": 0.2, "dry_multiplier": 0.8, "logit_bias": {3: 2.0, 8: 1.0}},
    "adjusted_mirostat": {"mirostat": 2, "mirostat_tau": 3.0, "presence_penalty": 0.7, "logit_bias": {3: 2.0}},
}  # fmt: skip


def row_of_logits() -> Any:
    """float32 [vocab], some forbidden; ids below 12 and 90 are likely, so that adjustments show."""
    generator = torch.Generator().manual_seed(8)
    values = torch.randn(VOCAB, generator=generator) * 1.5
    values[[*range(12), 90]] += 6.0
    values[torch.rand(VOCAB, generator=generator) < 0.01] = -math.inf
    return values


def shares(sampling: SamplingParams, logits: list[float]) -> dict[int, float]:
    """The twin's probability of each id, over the cases of XTC."""
    twin = SamplerTwin()
    adjusted = twin.adjust(sampling, logits, PROMPT, OUTPUT)
    if sampling.mirostat:
        return twin.within_surprise(sampling, adjusted, 2 * sampling.mirostat_tau)
    found = defaultdict[int, float](float)
    for acts, share in ((False, 1.0 - sampling.xtc_probability), (True, sampling.xtc_probability)):
        if share > 0.0:
            for token_id, probability in twin.distribution(sampling, adjusted, acts).items():
                found[token_id] += share * probability
    assert not twin.doubtful
    return found


def in_cells(counts: Counter[int], means: dict[int, float]) -> tuple[dict[int, int], dict[int, float]]:
    """Counts and means of runs of ids that expect ten draws or more."""
    seen, wanted = defaultdict[int, int](int), defaultdict[int, float](float)
    cell = 0
    for token_id in sorted(means):
        seen[cell] += counts[token_id]
        wanted[cell] += means[token_id]
        cell += wanted[cell] >= 10
    return seen, wanted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_20_000_draws_have_the_distribution(kind: str) -> None:
    """Each draw is the first of a row that has just been opened, with a number of its own."""
    sampling = SamplingParams(seed=9, **KINDS[kind])
    native, logits = SampledSteps(ROWS, VOCAB), row_of_logits()
    expected = shares(sampling, logits.tolist())
    rows = [scheduled_row(row, (1,), len(PROMPT + OUTPUT) - 1, True) for row in range(ROWS)]
    counts: Counter[int] = Counter()
    for step in range(STEPS):
        for row in range(ROWS):
            native.open(row, sampling, PROMPT + OUTPUT, prompt=len(PROMPT), choice=step * ROWS + row)
        counts.update(output.token_ids[0] for output in native.step(rows, logits.expand(ROWS, -1).contiguous()))
        for row in range(ROWS):
            native.maker.close(row)
    assert counts.keys() <= expected.keys()
    draws = counts.total()
    assert draws > 20_000
    means = {token_id: draws * share for token_id, share in expected.items()}
    assert abs(normal_deviate_of_chi_square(*in_cells(counts, means))) < 4.0


@pytest.mark.parametrize("kind", [kind for kind, options in KINDS.items() if options.keys() - {"temperature"}])
def test_each_kind_changes_the_distribution(kind: str) -> None:
    """The twin's distribution is not that of the temperature alone, so that what is left out would show."""
    logits, sampling = row_of_logits().tolist(), SamplingParams(**KINDS[kind])
    plain = shares(SamplingParams(temperature=sampling.temperature), logits)
    own = shares(sampling, logits)
    assert sum(abs(own.get(i, 0.0) - share) for i, share in plain.items()) > 0.05
