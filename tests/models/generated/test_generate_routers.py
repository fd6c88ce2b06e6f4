"""Generated routers: how often tokens choose each expert, with and without a Zipf law."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from realizar.checkpoint.open import open_checkpoint
from realizar.models.generated.generate import generate_gguf, router_weights, shares


def chosen(experts: int, per_token: int, skew: float, tokens: int = 4000, hidden: int = 512) -> np.ndarray:
    """The share of random normed tokens that choose each expert, the most chosen first."""
    x = np.random.default_rng(1).standard_normal((tokens, hidden), dtype=np.float32)
    x /= np.sqrt((x * x).mean(axis=1, keepdims=True))
    logits = x @ router_weights(experts, per_token, hidden, skew, [3]).T
    best = np.argsort(-logits, axis=1)[:, :per_token]
    return np.sort(np.bincount(best.ravel(), minlength=experts) / tokens)[::-1]


@pytest.mark.parametrize(("experts", "per_token"), [(128, 8), (64, 8), (32, 4), (128, 4)])
def test_without_a_skew_all_experts_are_alike(experts: int, per_token: int) -> None:
    found = chosen(experts, per_token, 0.0)
    assert found.sum() == pytest.approx(per_token)
    assert found[0] < 3 * found[-1]


@pytest.mark.parametrize(("experts", "per_token", "skew"), [(128, 8, 0.5), (128, 8, 1.0), (64, 8, 1.0), (32, 4, 0.7)])
def test_with_a_skew_they_follow_the_law(experts: int, per_token: int, skew: float) -> None:
    found, wanted = chosen(experts, per_token, skew), shares(experts, per_token, skew)
    assert wanted.sum() == pytest.approx(per_token)
    assert wanted.max() <= 0.45
    assert np.abs(found - wanted).max() <= 0.1
    assert found[: experts // 4].sum() == pytest.approx(wanted[: experts // 4].sum(), rel=0.1)
    assert found[0] > 2 * found[-1]


def test_shares_are_a_zipf_law_where_none_is_too_large() -> None:
    law = shares(128, 4, 0.5)
    np.testing.assert_allclose(law[:-1] / law[1:], np.sqrt(np.arange(2, 129) / np.arange(1, 128)))
    steep = shares(16, 4, 4.0)
    assert (steep[:7] == 0.45).all()
    assert steep.sum() == pytest.approx(4)


def test_a_layers_preferred_experts_are_its_own() -> None:
    first, second = (router_weights(32, 4, 256, 1.0, [seed]) for seed in (1, 2))
    norms = [np.linalg.norm(weights, axis=1) for weights in (first, second)]
    assert norms[0].argmax() != norms[1].argmax()
    np.testing.assert_array_equal(first, router_weights(32, 4, 256, 1.0, [1]))


def test_a_token_for_most_experts_prefers_none() -> None:
    np.testing.assert_array_equal(router_weights(8, 4, 64, 1.0, [1]), router_weights(8, 4, 64, 0.0, [1]))


def test_the_skew_is_in_the_files_routers_alone(tmp_path: Path) -> None:
    for skew in (0.0, 1.0):
        generate_gguf("tiny-moe", tmp_path / f"{skew}.gguf", "q8_0", skew=skew)
    plain, skewed = (open_checkpoint(tmp_path / f"{skew}.gguf").tensors for skew in (0.0, 1.0))
    different = {name for name in plain if not np.array_equal(plain[name].data, skewed[name].data)}
    assert different == {f"blk.{index}.ffn_gate_inp.weight" for index in range(2)}
