"""A mixture's kernels against numpy: the choice of experts, pairs sorted by expert, and the experts' sums."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from backends.cpu.kernels.expert_harness import Mixture, expected
from backends.cpu.kernels.linear_harness import HOST_SETS
from random_models import Recipe, random_model
from realizar.backends.cpu.kernels.routing import CHOOSE, COUNT_FIELDS, ITEM_FIELDS, SORT, choose, sort_by_expert
from realizar.backends.cpu.records import address
from realizar.backends.cpu.weights.pack import FloatMatrix
from reference_tensors import load_tensors
from wider import wider


def run_choose(
    scores: NDArray[np.float32],
    per_token: int,
    *,
    normalized: bool = True,
    scale: float = 1.0,
    threads: int = 2,
    sigmoid: bool = False,
    bias: NDArray[np.float32] | None = None,
    groups: tuple[int, int] = (1, 1),
    expert_scales: NDArray[np.float32] | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    tokens, experts = scores.shape
    rows = np.full((tokens, experts + 5), np.nan, np.float32)
    rows[:, :experts] = scores
    chosen, weights = np.full((tokens, per_token), -1, np.int32), np.zeros((tokens, per_token), np.float32)
    step = np.array([tokens])
    record = CHOOSE.pack({
        "step": address(step), "count_field": 0, "scores": address(rows), "scores_stride": rows.strides[0],
        "experts": experts, "per_token": per_token, "normalized": int(normalized), "scale": scale,
        "chosen": address(chosen), "weights": address(weights), "sigmoid": int(sigmoid), "bias": address(bias),
        "groups": groups[0], "groups_per_token": groups[1],
        "expert_scales": address(expert_scales),
    })  # fmt: skip
    for thread in range(threads):
        choose.call(address(record), thread, threads)
    return chosen, weights


@pytest.mark.parametrize(("experts", "per_token"), [(1, 1), (8, 8), (60, 4), (128, 8), (257, 1)])
@pytest.mark.parametrize("normalized", [True, False])
def test_choice_is_numpys(experts: int, per_token: int, normalized: bool) -> None:
    rng = np.random.default_rng(experts)
    scores = (3 * rng.standard_normal((33, experts))).astype(np.float32)
    chosen, weights = run_choose(scores, per_token, normalized=normalized, scale=2.5)
    wide = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    wide /= wide.sum(axis=1, keepdims=True)
    want = np.argsort(-wide, axis=1, kind="stable")[:, :per_token]
    np.testing.assert_array_equal(chosen, want)
    picked = np.take_along_axis(wide, want, axis=1)
    if normalized:
        picked /= picked.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(weights, 2.5 * picked, rtol=3e-6)
    for count in (1, 2, 32):  # the same bits alone and in any batch
        alone, own = run_choose(scores[:count], per_token, normalized=normalized, scale=2.5, threads=3)
        np.testing.assert_array_equal(alone, chosen[:count])
        np.testing.assert_array_equal(own.view(np.uint32), weights[:count].view(np.uint32))


@pytest.mark.parametrize("normalized", [True, False])
def test_factors_of_experts_scale_weights_and_choose_nothing(normalized: bool) -> None:
    rng = np.random.default_rng(3)
    scores = rng.standard_normal((9, 20)).astype(np.float32)
    factors = rng.uniform(0.25, 4, 20).astype(np.float32)
    chosen, weights = run_choose(scores, 3, normalized=normalized)
    also, scaled = run_choose(scores, 3, normalized=normalized, expert_scales=factors)
    np.testing.assert_array_equal(also, chosen)
    np.testing.assert_allclose(scaled, weights * factors[chosen], rtol=1e-6)


@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("groups", [(1, 1), (4, 2), (12, 5), (2, 2)])
def test_ranks_and_groups_choose_and_scores_weigh(sigmoid: bool, biased: bool, groups: tuple[int, int]) -> None:
    """Against sums in float64, one token after the other. A bias may be below zero, and weighs nothing."""
    rng, (count, kept) = np.random.default_rng(groups[0]), groups
    logits = rng.standard_normal((40, 24)).astype(np.float32)
    bias = rng.standard_normal(24).astype(np.float32) if biased else None
    chosen, weights = run_choose(logits, 4, sigmoid=sigmoid, bias=bias, groups=groups, scale=1.5)
    for token, row in enumerate(logits.astype(np.float64)):
        scores = 1 / (1 + np.exp(-row)) if sigmoid else np.exp(row) / np.exp(row).sum()
        ranks = scores + (0 if bias is None else bias)
        size = 24 // count
        sums = [sum(sorted(ranks[group * size : (group + 1) * size])[-2:]) for group in range(count)]
        best = sorted(range(count), key=lambda group, sums=sums: -sums[group])[:kept]
        allowed = [expert for expert in range(24) if expert // size in best]
        want = sorted(allowed, key=lambda expert, ranks=ranks: -ranks[expert])[:4]
        assert chosen[token].tolist() == want
        np.testing.assert_allclose(weights[token], 1.5 * scores[want] / scores[want].sum(), rtol=3e-6)
    alone = run_choose(logits[7:8], 4, sigmoid=sigmoid, bias=bias, groups=groups, scale=1.5, threads=3)
    np.testing.assert_array_equal(alone[0][0], chosen[7])
    np.testing.assert_array_equal(alone[1][0].view(np.uint32), weights[7].view(np.uint32))


def test_of_groups_with_equal_sums_the_earlier_are_kept() -> None:
    chosen, _ = run_choose(np.zeros((2, 12), np.float32), 4, sigmoid=True, groups=(4, 2))
    assert chosen.tolist() == [[0, 1, 2, 3]] * 2
    bias = np.repeat(np.array([-3, 2, 2, 2], np.float32), 3)
    assert run_choose(np.zeros((1, 12), np.float32), 4, bias=bias, groups=(4, 2))[0].tolist() == [[3, 4, 5, 6]]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_groups_of_scores_that_are_no_numbers_choose_experts_that_exist(bad: float) -> None:
    scores = np.array([[1, bad, 2, 0, 1, bad], [bad] * 6], np.float32)
    for sigmoid in (True, False):
        for row in run_choose(scores, 3, sigmoid=sigmoid, groups=(3, 2))[0].tolist():
            assert len(set(row)) == 3
            assert set(row) <= set(range(6))


def test_sigmoids_that_are_all_zero_weigh_nothing() -> None:
    _, weights = run_choose(np.full((1, 4), -200, np.float32), 2, sigmoid=True)
    np.testing.assert_array_equal(weights, 0.0)


def test_ties_choose_the_lowest_ids() -> None:
    scores = np.array([[1, 2, 2, 1, 2], [0, 0, 0, 0, 0], [-90, -100, 0, -200, -90]], np.float32)
    chosen, weights = run_choose(scores, 4)
    assert chosen.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [2, 0, 4, 1]]
    np.testing.assert_array_equal(weights[1], np.float32(0.25))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_scores_that_are_no_numbers_choose_experts_that_exist(bad: float) -> None:
    scores = np.array([[1, bad, 2, 0], [bad, bad, bad, bad], [0, 1, 2, 3]], np.float32)
    chosen, weights = run_choose(scores, 3)
    for row in chosen.tolist():
        assert len(set(row)) == 3
        assert set(row) <= set(range(4))
    np.testing.assert_array_equal(weights[2], run_choose(scores[2:], 3)[1][0])


def run_sort(chosen: NDArray[np.int32], experts: int, width: int, run: int) -> tuple[Any, list[list[int]], list[int]]:
    """Positions [tokens, per token], items, and counts."""
    tokens, per_token = chosen.shape
    positions, starts = np.full(chosen.size, -1, np.int32), np.zeros(experts, np.int64)
    items = np.full((chosen.size // width + min(experts, chosen.size) + 1) * ITEM_FIELDS, -1, np.int64)
    counts, step = np.zeros(COUNT_FIELDS, np.int64), np.array([tokens])
    record = SORT.pack({
        "step": address(step), "count_field": 0, "experts": experts, "per_token": per_token, "chosen": address(chosen),
        "positions": address(positions), "starts": address(starts), "items": address(items),
        "counts": address(counts), "width": width, "run": run,
    })  # fmt: skip
    for thread in range(2):
        sort_by_expert.call(address(record), thread, 2)
    return positions.reshape(chosen.shape), items.reshape(-1, ITEM_FIELDS)[: counts[0] + 1].tolist(), counts.tolist()


@pytest.mark.parametrize(("tokens", "experts", "per_token"), [(1, 5, 5), (1, 9, 2), (70, 7, 3), (40, 30, 1)])
def test_pairs_are_sorted_by_expert_and_token(tokens: int, experts: int, per_token: int) -> None:
    rng, width, run = np.random.default_rng(tokens), 12, 24
    chosen = np.array([rng.permutation(experts)[:per_token] for _ in range(tokens)], np.int32)
    positions, items, (num_items, used, *_) = run_sort(chosen, experts, width, run)
    assert len(items) == num_items + 1
    assert used == len(np.unique(chosen))
    of_position = dict(zip(positions.ravel().tolist(), chosen.ravel().tolist(), strict=True))
    assert len(of_position) == chosen.size
    seen: list[int] = []
    for expert, first, pairs, _ in items[:-1]:
        assert first % width == 0
        assert 0 < pairs <= run
        assert all(of_position[first + i] == expert for i in range(pairs))
        seen += range(first, first + pairs)
    assert seen == sorted(of_position), "each position lies in one item"
    tokens_in_order = np.argsort(positions.ravel()) // per_token
    experts_in_order = chosen.ravel()[np.argsort(positions.ravel())]
    assert sorted(zip(experts_in_order, tokens_in_order, strict=True)) == list(
        zip(experts_in_order, tokens_in_order, strict=True)
    )
    costs = [item[3] for item in items]
    assert [b - a for a, b in pairwise(costs)] == [max(item[2], 8) for item in items[:-1]]


def routes(kind: str, tokens: int, experts: int, per_token: int, rng: np.random.Generator) -> NDArray[np.int32]:
    """Chosen experts: any, all tokens the last ones, or none the first ones."""
    first = {"any": 0, "last": experts - per_token, "not the first": min(1, experts - per_token)}[kind]
    return np.array([first + rng.permutation(experts - first)[:per_token] for _ in range(tokens)], np.int32)


SHAPES = {
    "plain": Recipe(experts=6, per_token=2, hidden_size=64, feed_forward_size=96, head_size=32, windows=(None,)),
    "one": Recipe(experts=1, per_token=1, hidden_size=96, feed_forward_size=32, head_size=32, windows=(None,)),
    "all": Recipe(experts=4, per_token=4, hidden_size=160, feed_forward_size=96, head_size=32, windows=(None,)),
}


def model(name: str, weights: str, **changes: Any) -> Any:
    return random_model(replace(SHAPES[name], weights=weights, **changes))


@pytest.mark.parametrize("kind", ["any", "last", "not the first"])
@pytest.mark.parametrize("name", SHAPES)
def test_experts_in_float32(name: str, kind: str) -> None:
    """Against numpy in float64; 90 tokens make several items of the experts that all choose."""
    spec, checkpoint = model(name, "F32")
    tensors = load_tensors(spec, checkpoint)
    mixture, rng = Mixture.load(spec, checkpoint, block_bytes=0), np.random.default_rng(8)
    part = mixture.experts
    stacks = tuple(tensors[each.weight].astype(np.float64) for each in part.expert_linears())
    for tokens in (1, 2, 13, 90):
        x = rng.standard_normal((tokens, spec.hidden_size)).astype(np.float32)
        chosen = routes(kind, tokens, part.num_experts, part.experts_per_token, rng)
        weights = rng.random(chosen.shape).astype(np.float32)
        want = expected(stacks, x.astype(np.float64), chosen, weights.astype(np.float64))
        got = mixture.run(x, chosen, weights, threads=2)
        assert np.abs(got - want).max() <= 2e-6 * np.abs(want).max()


@pytest.mark.parametrize("width", [40, 50, 72])
def test_widths_that_are_no_whole_tiles(width: int) -> None:
    spec, checkpoint = model("plain", "F16", hidden_size=72, feed_forward_size=width, head_size=24)
    tensors = load_tensors(spec, checkpoint)
    mixture, rng = Mixture.load(spec, checkpoint), np.random.default_rng(9)
    x = rng.standard_normal((9, 72)).astype(np.float32)
    chosen, weights = routes("any", 9, 6, 2, rng), rng.random((9, 2)).astype(np.float32)
    stacks = tuple(tensors[each.weight].astype(np.float64) for each in mixture.experts.expert_linears())
    want = expected(stacks, x.astype(np.float64), chosen, weights.astype(np.float64))
    assert np.abs(mixture.run(x, chosen, weights) - want).max() <= 2e-6 * np.abs(want).max()


@pytest.mark.parametrize("weights", ["F32", "MXFP4"])
def test_biases_and_the_clamped_activation(weights: str) -> None:
    """Biases of all three matrices, and gates and ups on both sides of the clamp."""
    spec, checkpoint = model(
        "plain", weights, parts=("expert_biases", "clamped"), head_size=32
    )  # fmt: skip
    tensors = {name: values.astype(np.float64) for name, values in load_tensors(spec, checkpoint).items()}
    mixture, rng = Mixture.load(spec, checkpoint), np.random.default_rng(12)
    part = mixture.experts
    x = (6 * rng.standard_normal((30, spec.hidden_size))).astype(np.float32)
    chosen, factors = routes("any", 30, 6, 2, rng), rng.random((30, 2)).astype(np.float32)
    want, clamped = np.zeros(x.shape), 0
    for token, row in enumerate(x.astype(np.float64)):
        for expert, factor in zip(chosen[token], factors[token], strict=True):
            gate, up = (
                tensors[one.weight][expert] @ row + tensors[one.bias or ""][expert] for one in (part.gate, part.up)
            )
            clamped += int((gate > 7).sum() + (np.abs(up) > 7).sum())
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
            fed = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            want[token] += factor * (tensors[part.down.weight][expert] @ fed + tensors[part.down.bias or ""][expert])
    assert clamped > 100
    tolerance = 2e-6 if weights == "F32" else 2e-2
    got = mixture.run(x, chosen, factors, 2)
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)
    np.testing.assert_array_equal(mixture.run(x[4:5], chosen[4:5], factors[4:5])[0], got[4])


@pytest.mark.parametrize(("weights", "width"), [("F32", 50), ("F32", 96), ("Q8_0", 96)])
def test_experts_without_a_gate(weights: str, width: int) -> None:
    """Their ReLU is squared; what lies where a gate would be is not read."""
    spec, checkpoint = model(
        "plain", weights, parts=("ungated_experts",), activation="relu_squared", feed_forward_size=width
    )
    tensors = {name: values.astype(np.float64) for name, values in load_tensors(spec, checkpoint).items()}
    mixture, rng = Mixture.load(spec, checkpoint), np.random.default_rng(14)
    up, down = (tensors[each.weight] for each in mixture.experts.expert_linears())
    x = rng.standard_normal((30, spec.hidden_size)).astype(np.float32)
    chosen, factors = routes("any", 30, 6, 2, rng), rng.random((30, 2)).astype(np.float32)
    want = np.zeros(x.shape)
    for token, row in enumerate(x.astype(np.float64)):
        for expert, factor in zip(chosen[token], factors[token], strict=True):
            want[token] += factor * (down[expert] @ np.maximum(up[expert] @ row, 0) ** 2)
    got = mixture.run(x, chosen, factors, 2)
    assert np.linalg.norm(got - want) <= (2e-6 if weights == "F32" else 2e-2) * np.linalg.norm(want)
    np.testing.assert_array_equal(mixture.run(x[4:5], chosen[4:5], factors[4:5])[0], got[4])


TYPES = [("Q4_K", "Q6_K"), ("Q8_0", "F32"), ("MXFP4", "IQ4_NL"), ("F16", "Q4_0")]


@pytest.mark.parametrize(
    ("instruction_set", "weights", "down"),
    wider(
        [(name, *types) for name in HOST_SETS for types in TYPES],
        *((HOST_SETS[0], *types) for types in TYPES),
        (HOST_SETS[-1], *TYPES[0]),
    ),
)
def test_quantised_experts(weights: str, down: str, instruction_set: str) -> None:
    """Near float64 alone; and the same bits for a token alone, in any batch, and with any number of threads."""
    sizes = {"hidden_size": 256, "feed_forward_size": 288 if weights == "MXFP4" else 256, "down_weights": down}
    spec, checkpoint = model("plain", weights, head_size=64, **sizes)
    tensors = load_tensors(spec, checkpoint)
    mixture = Mixture.load(spec, checkpoint, instruction_set=instruction_set, block_bytes=24 * 512)
    rng, tokens = np.random.default_rng(10), 100
    x = rng.standard_normal((tokens, 256)).astype(np.float32)
    chosen, factors = routes("any", tokens, 6, 2, rng), rng.random((tokens, 2)).astype(np.float32)
    chosen[:60] = [3, 5]  # several items of an expert
    together = mixture.run(x, chosen, factors)
    stacks = tuple(tensors[each.weight].astype(np.float64) for each in mixture.experts.expert_linears())
    want = expected(stacks, x.astype(np.float64), chosen, factors.astype(np.float64))
    assert np.linalg.norm(together - want) <= 2e-2 * np.linalg.norm(want), "int8 activations"
    for threads in (2, 3, 5):
        again = mixture.run(x, chosen, factors, threads)
        np.testing.assert_array_equal(again.view(np.uint32), together.view(np.uint32))
    for some in ([7], [99, 3], list(range(90, 60, -1))):
        part = mixture.run(x[some], chosen[some], factors[some], 2)
        np.testing.assert_array_equal(part.view(np.uint32), together[some].view(np.uint32))


def test_experts_that_no_token_chose_are_not_read() -> None:
    """Their weights are NaN here: a product with them would reach the sums."""
    spec, checkpoint = model("plain", "F32")
    mixture, rng = Mixture.load(spec, checkpoint), np.random.default_rng(11)
    for each in mixture.experts.expert_linears():
        stack = mixture.weights.matrices[each.weight]
        assert isinstance(stack, FloatMatrix)
        for expert in (0, 4):
            stack.part(expert).weights.view(np.float32)[:] = np.nan
    x = rng.standard_normal((40, 64)).astype(np.float32)
    chosen = np.array([[1, 2], [5, 3]] * 20, np.int32)
    assert np.isfinite(mixture.run(x, chosen, np.ones((40, 2), np.float32), 2)).all()
    assert mixture.workspace.routing.counts[1] == 4
