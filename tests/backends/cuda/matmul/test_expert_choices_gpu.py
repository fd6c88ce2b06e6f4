"""The choice of experts on a GPU, for few tokens and for many, beside its twin in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch", reason="the GPU backend needs torch")
pytest.importorskip("triton", reason="the GPU backend needs triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from backends.cuda.matmul.packed_experts import expected_choices  # noqa: E402
from random_models import Recipe, random_model  # noqa: E402
from realizar.backends.cuda.matmul.quantized import MatmulKernels  # noqa: E402
from realizar.backends.cuda.matmul.routing import Router, RouterKernels  # noqa: E402
from realizar.models.parts import Linear, Norm  # noqa: E402
from realizar.models.spec import Experts  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


@pytest.mark.parametrize(
    ("hidden", "count", "per_token"), [(2048, 128, 8), (2880, 32, 4), (64, 5, 5), (3200, 3, 1), (1024, 256, 8)]
)
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(
    "parts",
    [
        (),
        ("bias",),
        ("scales",),
        ("sigmoid", "bias", "selection"),
        ("groups", "selection"),
        ("sigmoid", "groups"),
        ("shared", "scales"),
        ("gate",),
        ("gate", "bias", "sigmoid"),
    ],
)
def test_choices(hidden: int, count: int, per_token: int, normalized: bool, parts: Sequence[str]) -> None:
    """The norm, scores and choice of one kernel, for few tokens and for many; of equal ranks the lowest index, and
    none for tokens of padding. The shared expert comes last, by its gate where it has one."""
    spec, _ = random_model(Recipe(hidden_size=256, feed_forward_size=64, windows=(None,), experts=5))
    part = spec.layers[0].feed_forward
    assert isinstance(part, Experts)
    groups = min(count // 4, 32), min(count // 8, 16)
    if "groups" not in parts or count % 8:
        groups = 1, 1
    part = replace(
        part, router=Linear("router", count, hidden), experts_per_token=per_token, normalized=normalized, scale=2.5,
        scoring="sigmoid" if "sigmoid" in parts else "softmax", num_groups=groups[0], groups_per_token=groups[1],
        selection_bias="selection" if "selection" in parts else None,
    )  # fmt: skip
    rng = np.random.default_rng(count)
    ranks = torch.from_numpy((rng.integers(-2, 3, count) / 8).astype(np.float32)).cuda()
    selection = ranks if "selection" in parts else None
    rows = rng.standard_normal((count, hidden)).astype(np.float32) / np.sqrt(hidden).astype(np.float32)
    rows[count // 2] = rows[0]  # always equal
    rows[-1] = rows[0]
    kernels, shared = RouterKernels(MatmulKernels(DEVICE)), 2 if "gate" in parts else int("shared" in parts)
    bias = (rng.integers(-2, 3, count) / 8).astype(np.float32) if "bias" in parts else np.zeros(count, np.float32)
    bias[count // 2] = bias[-1] = bias[0]
    if shared == 2:
        rows = np.concatenate([rows, rng.standard_normal((1, hidden)).astype(np.float32) / np.float32(hidden**0.5)])
        bias = np.append(bias, np.float32(-0.5 if "bias" in parts else 0.0))
    on_device = torch.from_numpy(bias).cuda() if "bias" in parts else None
    factors = rng.standard_normal(count).astype(np.float32) if "scales" in parts else np.ones(count, np.float32)
    scales = torch.from_numpy(factors).cuda() if "scales" in parts else None
    router = Router(torch.from_numpy(rows).cuda(), on_device, part, 1e-5, selection, scales, shared=shared)
    router = replace(router, columns=kernels.columns(router.key, router.weights))
    assert kernels.runs(part, Norm("rms", 1e-5, "norm"))
    kernels.prepare([router])
    for tokens, live in MANY if router.most_tokens > 16 else MANY[:2]:
        x = (3 * rng.standard_normal((tokens, hidden))).astype(np.float32)
        x[1] = 0.0  # all scores are
        check_choices(kernels, router, x, live, rows, bias, factors)


MANY = (7, 5), (16, 16), (17, 17), (37, 30), (64, 41), (101, 101), (256, 250)  # tokens of a step, those that are live


def check_choices(
    kernels: RouterKernels, router: Router, x: NDArray[np.float32], live: int, rows: NDArray[np.float32],
    bias: NDArray[np.float32], factors: NDArray[np.float32],
) -> None:  # fmt: skip
    tokens, part, count = len(x), router.experts, router.experts.num_experts
    per_token, normalized = part.experts_per_token, part.normalized
    header = torch.tensor([0, live], dtype=torch.int32, device=DEVICE)
    places = per_token + (router.shared > 0)
    chosen = torch.full((tokens + 1, places), -9, dtype=torch.int32, device=DEVICE)
    weights, memory = torch.zeros((tokens, places), device=DEVICE), torch.zeros(tokens * (count + 1), device=DEVICE)
    scores = memory[: tokens * count].view(tokens, count)
    for _ in range(3):  # arrivals are left as they were
        kernels.launch(router, torch.from_numpy(x).cuda(), header, scores, chosen, weights, tokens)
    root = np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=1, keepdims=True) + 1e-5)
    expected = (x / root) @ rows.T.astype(np.float64) + bias
    expected, gates = expected[:, :count], expected[:, count:]
    found = scores.cpu().numpy()
    np.testing.assert_allclose(found[:live], expected[:live], atol=1e-5)
    order, shares = chosen.cpu().numpy(), shares_of(part, found)
    assert (order[tokens:] == -9).all()
    order = order[:tokens]
    assert (order[live:] == -1).all()
    if router.shared:
        wanted = 1 / (1 + np.exp(-gates[:live, 0])) if router.shared == 2 else 1.0
        assert (order[:live, per_token] == count).all()
        np.testing.assert_allclose(weights.cpu().numpy()[:live, per_token], wanted, rtol=1e-5)
        order = order[:, :per_token]
    if router.selection is not None or part.num_groups > 1:  # ranks are equal or apart
        wanted_order = expected_choices(part, shares, router.selection)[:live]
        assert np.array_equal(np.sort(order[:live]), np.sort(wanted_order))
    else:
        assert np.array_equal(order[:live], np.argsort(-found, axis=1, kind="stable")[:live, :per_token])
    shares = np.take_along_axis(shares_of(part, expected), np.maximum(order, 0), axis=1)
    wanted = 2.5 * (shares / shares.sum(axis=1, keepdims=True) if normalized else shares) * factors[order]
    np.testing.assert_allclose(weights.cpu().numpy()[:live, :per_token], wanted[:live], rtol=1e-4)


def shares_of(part: Experts, sums: NDArray[np.floating]) -> NDArray[np.floating]:
    if part.scoring == "sigmoid":
        return 1 / (1 + np.exp(-sums))
    powers = np.exp(sums - sums.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)
