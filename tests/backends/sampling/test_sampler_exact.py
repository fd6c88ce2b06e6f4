"""Each transform, and all in their order, against the float64 twin on random and adversarial logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from backends.kernel_sampler import KernelSampler
from backends.reference_sampler import philox, truncation
from backends.reference_sampler.sampler import RowSampler
from backends.reference_sampler.select import largest, largest_ordered, shortest_prefix
from realizar.errors import InvalidRequestError, RealizarError
from realizar.sampling_params import SamplingParams
from step_inputs import opened_row

PLAIN = st.floats(-20, 20, width=32)
COARSE = st.integers(-3, 3).map(float)  # many ties
WILD = st.sampled_from([0.0, -math.inf, 3e38, -3e38, 1e-30, 88.0, -104.0, -750.0])


@st.composite
def logit_rows(draw: st.DrawFn, largest_size: int = 40) -> list[float]:
    element = draw(st.sampled_from([PLAIN, COARSE, st.one_of(PLAIN, WILD)]))
    row = draw(st.lists(element, min_size=1, max_size=largest_size))
    assume(any(value > -math.inf for value in row))
    return row


TRUNCATIONS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "none": st.just({}),
    "top_n_sigma": st.fixed_dictionaries({"top_n_sigma": st.floats(0.01, 4)}),
    "top_k": st.fixed_dictionaries({"top_k": st.integers(-1, 45)}),
    "typical": st.fixed_dictionaries({"typical_p": st.floats(0.01, 1)}),
    "top_p": st.fixed_dictionaries({"top_p": st.floats(0.001, 1)}),
    "min_p": st.fixed_dictionaries({"min_p": st.floats(0, 1)}),
    "xtc": st.fixed_dictionaries({"xtc_probability": st.floats(0, 1), "xtc_threshold": st.floats(1e-9, 0.6)}),
}
TRUNCATIONS["all"] = st.tuples(*TRUNCATIONS.values()).map(
    lambda parts: {k: v for part in parts for k, v in part.items()}
)


@pytest.mark.parametrize("name", TRUNCATIONS)
def test_choice_equals_twin(new_sampler: Any, name: str, twin: Any) -> None:
    @given(logit_rows(), TRUNCATIONS[name], st.floats(0.05, 5), st.integers(0, 2**64 - 1), st.integers(0, 100_000))
    def check(row: list[float], options: dict[str, Any], temperature: float, seed: int, position: int) -> None:
        sampling = SamplingParams(temperature=temperature, seed=seed, **options)
        reference = twin()
        acts = philox.uniform(seed, 1, position, philox.DRAW_XTC) < sampling.xtc_probability
        distribution = reference.distribution(sampling, row, acts)
        expected = reference.pick(distribution, philox.uniform(seed, 1, position, philox.DRAW_TOKEN))
        assume(not reference.doubtful)
        sampler = new_sampler(opened_row(0, sampling, [0], 1, 1), len(row))
        assert sampler.sample(np.array(row, np.float32), position).token_id == expected

    check()


@pytest.mark.parametrize("name", ["top_n_sigma", "top_k", "typical", "top_p", "min_p"])
def test_support_and_probabilities_equal_twin(name: str, twin: Any) -> None:
    @given(logit_rows(), TRUNCATIONS[name], st.floats(0.05, 5))
    def check(row: list[float], options: dict[str, Any], temperature: float) -> None:
        sampling = SamplingParams(temperature=temperature, **options)
        reference = twin()
        expected = {i: p for i, p in reference.distribution(sampling, row, False).items() if p > 1e-280}
        assume(not reference.doubtful)
        these = truncation.truncate(np.array(row, np.float32), sampling)
        shares = these.weights / these.weights.sum()
        got = {int(i): float(p) for i, p in zip(these.ids, shares, strict=True) if p > 1e-280}
        assert got.keys() == expected.keys()
        for token_id, probability in expected.items():
            assert got[token_id] == pytest.approx(probability, rel=1e-9)

    check()


def kept(row: list[float], **options: Any) -> list[int]:
    return truncation.truncate(np.array(row, np.float32), SamplingParams(**options)).ids.tolist()


def test_ties_go_to_lower_ids_and_limits_are_inclusive() -> None:
    assert kept([1.0] * 8, top_k=3) == [0, 1, 2]
    assert kept([0.0, 1.0, 1.0, 1.0, 2.0], top_k=3) == [1, 2, 4]
    assert kept([1.0] * 8, top_p=0.5) == [0, 1, 2, 3]
    assert kept([1.0] * 8, typical_p=0.25) == [0, 1]
    assert kept([1.0] * 8, min_p=1.0) == list(range(8))
    assert kept([1.0] * 8, top_n_sigma=0.1) == list(range(8))
    assert kept([0.0, 2.0], top_n_sigma=2.0) == [0, 1]
    assert kept([5.0], top_p=0.001, top_k=1, typical_p=0.1) == [0]
    assert kept([-math.inf, 3.0, -math.inf], top_k=2) == [1]


def test_xtc_keeps_the_least_probable_of_the_high_ones() -> None:
    probabilities = np.array([0.4, 0.05, 0.25, 0.25, 0.05])
    these = truncation.gather(np.log(probabilities).astype(np.float32), 1.0)
    assert truncation.exclude_top_choices(these, 0.2).ids.tolist() == [1, 3, 4]
    assert truncation.exclude_top_choices(these, 0.3).ids.tolist() == [0, 1, 2, 3, 4]


def test_the_lowest_draw_never_falls_on_a_forbidden_id() -> None:
    row = np.full(40_000, -np.inf, np.float32)
    row[[20_000, 30_000]] = 1.0, 2.0
    assert truncation.draw_untruncated(row, 1.0, 0.0) == 20_000
    assert truncation.draw_untruncated(row, 1.0, 1 - 2**-24) == 30_000
    these = truncation.gather(row, 1.0)
    assert these.ids[truncation.draw(these, 0.0)] == 20_000


def big_rows() -> list[NDArray[np.float32]]:
    random = np.random.default_rng(5)
    size = 20_011
    return [
        random.normal(0, 3, size).astype(np.float32),
        np.round(random.normal(0, 2, size)).astype(np.float32),
        np.zeros(size, np.float32),
        np.where(random.random(size) < 0.999, -np.inf, random.normal(0, 3, size)).astype(np.float32),
        np.sort(random.standard_cauchy(size)).astype(np.float32),
    ]


@pytest.mark.parametrize("row", big_rows(), ids=["normal", "ties", "equal", "masked", "cauchy"])
def test_selections_on_large_rows_equal_a_full_sort(row: NDArray[np.float32]) -> None:
    ranked = sorted(range(row.size), key=lambda i: (-row[i], i))
    for count in (1, 2, 50, 200, 300, 600, 5_000, row.size - 1, row.size, row.size + 5):
        assert np.array_equal(largest(row, count), np.sort(ranked[:count]))
        assert np.array_equal(largest_ordered(row, count), ranked[:count])
    finite = np.where(np.isfinite(row), row, -1000).astype(np.float64)
    weights = np.exp(np.maximum(finite - finite.max(), -700))
    for mass in (1e-9, 0.1, 0.5, 0.9, 0.95, 0.999):
        order = sorted(range(row.size), key=lambda i: (-finite[i], i))
        cumulated = np.cumsum(weights[order])
        target = mass * math.fsum(weights)
        got = shortest_prefix(-finite, weights, target)
        count = int(got.sum())
        assert np.array_equal(np.flatnonzero(got), np.sort(order[:count]))
        assert cumulated[count - 1] >= target * (1 - 1e-12)
        assert count == 1 or cumulated[count - 2] < target * (1 + 1e-12)


@given(logit_rows())
def test_greedy_takes_the_largest_and_lowest(new_sampler: Any, row: list[float]) -> None:
    sampler = new_sampler(opened_row(0, SamplingParams(temperature=0, top_k=3, mirostat=2), [], 0), len(row))
    logits = np.array(row, np.float32)
    assert sampler.sample(logits, 0).token_id == min(range(len(row)), key=lambda i: (-logits[i], i))


def test_extreme_values_do_not_overflow(new_sampler: Any) -> None:
    row = np.array([3e38, -3e38, 3.1e38, -np.inf], np.float32)
    for temperature in (5e-324, 1e-6, 1.0, 100.0):
        sampling = SamplingParams(temperature=temperature, typical_p=0.9, top_p=0.9, top_n_sigma=1, seed=0)
        assert new_sampler(opened_row(0, sampling, [], 0), 4).sample(row, 0).token_id == 2
    sampling = SamplingParams(temperature=0, repetition_penalty=1e-6, logit_bias={0: 100.0})
    assert (
        new_sampler(opened_row(0, sampling, [0, 1, 2, 3], 4), 4).sample(row, 0).token_id == 0
    )  # both at the bound: the lower id


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [[0.0, math.nan, 1.0], [0.0, math.inf], [-math.inf, -math.inf]])
def test_unusable_logits_are_an_error(new_sampler: Any, row: list[float], temperature: float) -> None:
    with pytest.raises(RealizarError, match="no token can be sampled"):
        new_sampler(opened_row(0, SamplingParams(temperature=temperature), [], 0), len(row)).sample(
            np.array(row, np.float32), 0
        )


def test_bias_beyond_the_vocabulary_is_refused(new_sampler: Any) -> None:
    for token_id in (-1, 10):
        with pytest.raises(InvalidRequestError, match="logit_bias") as caught:
            new_sampler(opened_row(0, SamplingParams(logit_bias={token_id: 1.0}), [], 0), 10)
        assert caught.value.param == "logit_bias"


@pytest.mark.parametrize("row", big_rows(), ids=["normal", "ties", "equal", "masked", "cauchy"])
@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.9},
        {"top_p": 0.999, "min_p": 0.01},
        {"typical_p": 0.9},
        {"typical_p": 0.2, "top_p": 0.7},
        {"min_p": 0.2},
    ],
    ids=str,
)
def test_truncation_of_large_rows_equals_twin(row: NDArray[np.float32], options: dict[str, float], twin: Any) -> None:
    sampling = SamplingParams(temperature=1.4, **options)
    reference = twin()
    expected = {i: p for i, p in reference.distribution(sampling, row.tolist(), False).items() if p > 1e-290}
    these = truncation.truncate(row, sampling)
    differing = set(these.ids.tolist()) ^ expected.keys()
    assert len(differing) <= (1 if reference.doubtful else 0)
    shares = dict(zip(these.ids.tolist(), (these.weights / these.weights.sum()).tolist(), strict=True))
    for token_id in expected.keys() - differing:
        assert shares[token_id] == pytest.approx(expected[token_id], rel=1e-3 if differing else 1e-9)


@pytest.mark.parametrize("row", big_rows(), ids=["normal", "ties", "equal", "masked", "cauchy"])
def test_untruncated_choice_of_large_rows_equals_twin(row: NDArray[np.float32], twin: Any) -> None:
    reference = twin()
    distribution = reference.distribution(SamplingParams(temperature=1.3), row.tolist(), False)
    ids = sorted(distribution)
    ends = np.cumsum([distribution[i] for i in ids])
    for uniform in [0.0, 1 - 2**-24, *np.random.default_rng(4).random(200)]:
        index = int(np.searchsorted(ends, uniform, side="right"))
        near = (
            {ids[max(index - 1, 0)], ids[min(index + 1, len(ids) - 1)]}
            if np.abs(ends - uniform).min() < 1e-12
            else set()
        )
        assert truncation.draw_untruncated(row, 1.3, float(uniform)) in {ids[min(index, len(ids) - 1)], *near}


@pytest.mark.parametrize("row", big_rows(), ids=["normal", "ties", "equal", "masked", "cauchy"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 40, "top_p": 0.95, "min_p": 0.05},
        {"top_k": 5_000, "top_n_sigma": 1.5},
        {"top_p": 0.9},
        {"top_p": 0.999, "min_p": 0.01},
        {"typical_p": 0.9},
        {"typical_p": 0.2, "top_p": 0.7},
        {"min_p": 0.2},
        {"xtc_probability": 0.5, "xtc_threshold": 1e-4},
        {"xtc_probability": 0.5, "xtc_threshold": 0.01, "top_p": 0.95},
        {"mirostat": 2, "mirostat_tau": 4.0},
    ],
    ids=str,
)
def test_the_kernels_choices_of_large_rows_are_the_references(
    row: NDArray[np.float32], options: dict[str, float]
) -> None:
    sampling = SamplingParams(temperature=1.4, seed=8, logprobs=20, **options)  # type: ignore[arg-type]
    ours, theirs = (each(opened_row(0, sampling, [1, 2]), row.size) for each in (KernelSampler, RowSampler))
    for position in range(40):
        found, wanted = ours.sample(row, position), theirs.sample(row, position)
        assert found.token_id == wanted.token_id
        assert found.logprobs is not None
        assert wanted.logprobs is not None
        assert found.logprobs.rank == wanted.logprobs.rank
        assert [i for i, _ in found.logprobs.top] == [i for i, _ in wanted.logprobs.top]
