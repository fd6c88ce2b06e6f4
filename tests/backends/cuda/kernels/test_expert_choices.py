"""The choice of experts beside numpy: ties, scores that are not finite, padding, divided weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")

from backends.cuda.matmul.packed_experts import expected_choices  # noqa: E402
from random_models import Recipe, random_model  # noqa: E402
from realizar.backends.cuda.kernels.experts import choose_experts  # noqa: E402
from wider import wider  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def choose(
    scores: NDArray[np.float32], per_token: int, live: int, normalized: bool = True, scale: float = 1.0,
    bias: NDArray[np.float32] | None = None, selection: NDArray[np.float32] | None = None, sigmoid: bool = False,
    groups: tuple[int, int] = (1, 1), scales: NDArray[np.float32] | None = None, shared: int = 0,
    gate: tuple[NDArray[np.float32], ...] = (), gate_bias: float | None = None, stream: bool = False,
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:  # fmt: skip
    (tokens, experts), places = scores.shape, per_token + (shared > 0)
    header = torch.zeros(16, dtype=torch.int32, device=DEVICE)
    header[1] = live
    chosen = torch.full((tokens, places), -9, dtype=torch.int32, device=DEVICE)
    weights = torch.zeros((tokens, places), device=DEVICE)
    vectors = bias, selection, scales
    biases = [torch.from_numpy(np.zeros(1, np.float32) if one is None else one).to(DEVICE) for one in vectors]
    padded, slots = 1 << (experts - 1).bit_length(), 1 << (places - 1).bit_length()
    normed, row = (torch.from_numpy(each).to(DEVICE) for each in gate or (np.zeros((1, 1), np.float32),) * 2)
    choose_experts[(tokens,)](
        torch.from_numpy(scores).to(DEVICE), experts, *biases, header, chosen, weights, scale, experts,
        normed, 1e-5, row, torch.full((1,), gate_bias or 0.0, device=DEVICE), row.numel(), PER_TOKEN=per_token,
        SHARED=shared, STREAM=stream, GATE_BIAS=gate_bias is not None, COLUMNS=16, GROUPS=groups[0],
        GROUPS_PER_TOKEN=groups[1], BIAS=bias is not None, SIGMOID=sigmoid, SELECTION=selection is not None,
        SCALED=scales is not None, NORMALIZED=normalized, DEPENDENT=False, SLOTS=slots, BLOCK=padded,
    )  # fmt: skip
    return chosen.cpu().numpy(), weights.cpu().numpy()


@pytest.mark.parametrize(
    ("experts", "per_token", "normalized"),
    wider(
        [(*size, normalized) for size in ((128, 8), (6, 3), (5, 5), (1, 1)) for normalized in (True, False)],
        (128, 8, True),
        (6, 3, False),
        (5, 5, True),
        (1, 1, False),
    ),
)
def test_highest_scores(experts: int, per_token: int, normalized: bool) -> None:
    rng = np.random.default_rng(experts)
    scores = rng.integers(-3, 4, (9, experts)).astype(np.float32)  # many are equal
    scores[0] = 1.0
    scores[1] += 80.0
    chosen, weights = choose(scores, per_token, 7, normalized, 2.5)
    powers = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    shares = powers / powers.sum(axis=1, keepdims=True)
    expected = np.argsort(-scores, axis=1, kind="stable")[:, :per_token]  # of equal ones the first
    assert np.array_equal(chosen[:7], expected[:7])
    assert (chosen[7:] == -1).all(), "tokens of padding choose none"
    found = np.take_along_axis(shares, expected, axis=1)
    wanted = 2.5 * (found / found.sum(axis=1, keepdims=True) if normalized else found)
    np.testing.assert_allclose(weights[:7], wanted[:7], rtol=1e-5)


def test_sigmoids_and_biases() -> None:
    """Ranks have a bias of their own, which may be negative and weighs nothing; sigmoids may all be zero."""
    rng = np.random.default_rng(4)
    scores, bias, selection = (rng.standard_normal(shape).astype(np.float32) for shape in ((6, 20), (20,), (20,)))
    scores[5] = -200.0
    chosen, weights = choose(scores, 4, 6, bias=bias, selection=selection, sigmoid=True)
    shares = 1 / (1 + np.exp(-(scores + bias).astype(np.float64)))
    expected = np.argsort(-(shares + selection), axis=1, kind="stable")[:, :4]
    assert np.array_equal(chosen, expected)
    found = np.take_along_axis(shares, expected, axis=1)
    np.testing.assert_allclose(weights[:5], (found / found.sum(axis=1, keepdims=True))[:5], rtol=1e-5)
    assert (weights[5] == 0).all()


def test_scales_of_experts() -> None:
    """Weights are multiplied by them once they are divided; choices are as without."""
    rng = np.random.default_rng(6)
    scores, scales = (rng.standard_normal(shape).astype(np.float32) for shape in ((6, 20), (20,)))
    plain, shares = choose(scores, 4, 6)
    chosen, weights = choose(scores, 4, 6, scales=scales)
    assert np.array_equal(chosen, plain)
    np.testing.assert_allclose(weights, shares * scales[chosen], rtol=1e-6)


@pytest.mark.parametrize("gate_bias", [None, -0.75])
@pytest.mark.parametrize(("shared", "stream"), [(1, False), (2, False), (2, True)])
def test_the_shared_expert_comes_last(shared: int, stream: bool, gate_bias: float | None) -> None:
    """Beside the same choices as without: by its gate of the norm or of the stream, or whole, neither divided nor
    scaled."""
    rng = np.random.default_rng(8)
    scores, normed, gate = (rng.standard_normal(shape).astype(np.float32) for shape in ((6, 20), (6, 50), (50,)))
    normed[4] *= 100
    plain, shares = choose(scores, 4, 5, scale=2.5)
    given = {"gate": (normed, gate), "gate_bias": gate_bias, "stream": stream}
    chosen, weights = choose(scores, 4, 5, scale=2.5, shared=shared, **given)
    assert np.array_equal(chosen[:, :4], plain)
    assert chosen[:, 4].tolist() == [20] * 5 + [-1]
    np.testing.assert_array_equal(weights[:, :4], shares)
    x = normed.astype(np.float64)
    if stream:
        x /= np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5)
    logits = x @ gate + (gate_bias or 0.0)
    np.testing.assert_allclose(weights[:, 4], 1 / (1 + np.exp(-logits)) if shared == 2 else 1.0, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize(
    ("experts", "groups", "per_token", "sigmoid"),
    wider(
        [(*size, sigmoid) for size in ((20, (4, 2), 5), (64, (8, 4), 6), (6, (6, 3), 2)) for sigmoid in (True, False)],
        (20, (4, 2), 5, True),
        (64, (8, 4), 6, False),
        (6, (6, 3), 2, True),
    ),
)
def test_groups(experts: int, groups: tuple[int, int], per_token: int, sigmoid: bool) -> None:
    """Experts come from the groups whose two highest ranks have the highest sums; of equal sums from the first ones."""
    rng = np.random.default_rng(experts)
    scores = rng.integers(-3, 4, (40, experts)).astype(np.float32)  # many ranks are equal, and many sums
    scores[0] = 1.0
    selection = (rng.integers(-2, 3, experts) / 4).astype(np.float32)
    spec, _ = random_model(Recipe(windows=(None,), experts=experts, per_token=per_token, weights="F32"))
    part = replace(
        spec.mixtures()[0][1], scoring="sigmoid" if sigmoid else "softmax", selection_bias="selection",
        num_groups=groups[0], groups_per_token=groups[1],
    )  # fmt: skip
    chosen, _ = choose(scores, per_token, 40, selection=selection, sigmoid=sigmoid, groups=groups)
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares = 1 / (1 + np.exp(-scores)) if sigmoid else powers / powers.sum(axis=1, keepdims=True)
    assert np.array_equal(chosen, expected_choices(part, shares, torch.from_numpy(selection)))


def test_scores_that_are_not_a_number_choose_experts_that_exist() -> None:
    scores = np.zeros((2, 6), np.float32)
    scores[0, 4] = np.nan
    scores[1, 5] = 1.0
    chosen, weights = choose(scores, 2, 2)
    assert chosen.tolist() == [[0, 1], [5, 0]]
    assert np.isnan(weights[0]).all()
    assert np.isfinite(weights[1]).all()
