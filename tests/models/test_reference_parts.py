"""Parts of the reference model against independent sums: experts one token at a time, convolutions, and chunks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hybrid_spec import EXPERTS, HIDDEN, LENGTH, hybrid_spec
from realizar.models.expert_norms import ExpertNorms
from realizar.models.mixers import ShortConvolution
from realizar.models.parts import Norm, Rope
from realizar.models.spec import Attention, Experts, FeedForward, ModelSpec
from reference_model import ReferenceModel, State

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]

Tensors = dict[str, NDArray[np.float64]]


def _spec() -> ModelSpec:
    """The spec with a layer of every kind, rope on its attention."""
    spec, layers = hybrid_spec(), []
    for layer in spec.layers:
        mixer = layer.mixer
        if isinstance(mixer, Attention):
            mixer = replace(mixer, rope=Rope("neox", (1.0, 0.1)))
        layers.append(replace(layer, mixer=mixer))
    return replace(spec, layers=tuple(layers))


def _tensors(spec: ModelSpec) -> Tensors:
    rng = np.random.default_rng(5)
    return {name: rng.standard_normal(one.shape) / math.sqrt(one.shape[-1]) for name, one in spec.tensors.items()}


def _model() -> ReferenceModel:
    return ReferenceModel(_spec(), _tensors(_spec()), np.float64)


def _inputs(tokens: int) -> NDArray[np.float64]:
    return np.random.default_rng(6).standard_normal((tokens, HIDDEN))


@pytest.mark.parametrize("chunks", [(1,) * 16, (2, 14), (5, 1, 7, 3), (15, 1)])
def test_chunks_give_what_the_whole_gives(chunks: tuple[int, ...]) -> None:
    model, state, found, first = _model(), State(), [], 0
    for count in chunks:
        found.append(model.logits(TOKENS[first : first + count], state))
        first += count
    np.testing.assert_allclose(np.concatenate(found), model.logits(TOKENS), rtol=1e-9, atol=1e-12)


def test_every_layer_with_a_mixer_reads_its_state() -> None:
    """The comparison above can fail."""
    model, state = _model(), State()
    model.logits(TOKENS[:5], state)
    assert sorted(state) == [0, 1, 2, 3]
    for layer in state:
        changed = {index: kept if index != layer else tuple(-part for part in kept) for index, kept in state.items()}
        assert not np.allclose(model.logits(TOKENS[5:], changed), model.logits(TOKENS)[5:])


def test_a_convolution_sums_the_last_tokens_of_each_channel() -> None:
    model = _model()
    part, x, tensors = model.spec.layers[2].mixer, _inputs(7), _tensors(_spec())
    assert isinstance(part, ShortConvolution)
    b, c, values = (x @ third.T for third in np.split(tensors["2.in.weight"], 3))
    expected = np.empty((7, HIDDEN))
    for channel in range(HIDDEN):
        # The order that np.convolve expects is the opposite one.
        sums = np.convolve((b * values)[:, channel], tensors["2.kernel"][channel, ::-1])[:7]
        expected[:, channel] = c[:, channel] * (sums + tensors["2.bias"][channel])
    found, kept = model.mixer(part, x, None)
    np.testing.assert_allclose(found, expected @ tensors["2.out.weight"].T)
    np.testing.assert_allclose(kept[0], (b * values)[1 - LENGTH :])


@pytest.mark.parametrize("normalized", [True, False])
def test_experts_one_token_at_a_time(normalized: bool) -> None:
    model, tensors, x = _model(), _tensors(_spec()), _inputs(9)
    part = model.spec.layers[1].feed_forward
    assert isinstance(part, Experts)
    expected = np.zeros((9, HIDDEN))
    for token in range(9):
        logits = [float(row @ x[token]) for row in tensors["1.router.weight"]]
        chances = [math.exp(value) / sum(map(math.exp, logits)) for value in logits]
        chosen = sorted(range(EXPERTS), key=lambda expert: -chances[expert])[:2]
        share = sum(chances[expert] for expert in chosen) if normalized else 1.0
        for expert in chosen:
            gate, up = (tensors[f"1.{kind}.weight"][expert] @ x[token] for kind in ("gate", "up"))
            fed = tensors["1.down.weight"][expert] @ (gate / (1 + np.exp(-gate)) * up)
            expected[token] += 1.5 * chances[expert] / share * fed
    found = model._feed_forward(replace(part, normalized=normalized, scale=1.5), x)
    np.testing.assert_allclose(found, expected)


def test_experts_with_norms_and_scales_beside_a_dense_feed_forward() -> None:
    model, tensors, x = _model(), _tensors(_spec()), _inputs(9)
    part, dense = (model.spec.layers[index].feed_forward for index in (1, 0))
    assert isinstance(part, Experts)
    assert isinstance(dense, FeedForward)
    names = ("router", "experts", "shared", "experts output", "shared output")
    rng = np.random.default_rng(3)
    weights = {name: 1 + 0.2 * rng.standard_normal(HIDDEN) for name in names}
    model._tensors |= {**weights, "scales": np.arange(EXPERTS) + 0.5}
    norms = {name: Norm("rms", 1e-5, name) for name in names}
    norms["router"] = replace(norms["router"], weight_scale=0.5)

    def normed(values: Any, name: str) -> Any:
        return values / np.sqrt((values**2).mean() + 1e-5) * weights[name]

    expected = np.zeros((9, HIDDEN))
    for token, row in enumerate(x):
        logits = tensors["1.router.weight"] @ (normed(row, "router") * 0.5)
        chosen = np.argsort(-logits)[:2]
        shares = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum() * (chosen + 0.5)
        total = np.zeros(HIDDEN)
        for expert, share in zip(chosen, shares, strict=True):
            gate, up = (tensors[f"1.{kind}.weight"][expert] @ normed(row, "experts") for kind in ("gate", "up"))
            total += share * (tensors["1.down.weight"][expert] @ (gate / (1 + np.exp(-gate)) * up))
        own = model._feed_forward(dense, normed(row, "shared")[None])[0]
        expected[token] = normed(total, "experts output") + normed(own, "shared output")
    beside = replace(part, shared=dense, norms=ExpertNorms(*norms.values()), expert_scales="scales")
    np.testing.assert_allclose(model._feed_forward(beside, x), expected)


def test_of_equal_scores_the_lower_index_is_chosen() -> None:
    spec = _spec()
    tensors, part = _tensors(spec), spec.layers[1].feed_forward
    assert isinstance(part, Experts)
    tensors["1.router.weight"][:] = 0
    for kind in ("gate", "up", "down"):
        tensors[f"1.{kind}.weight"][2:] = np.nan
    assert np.isfinite(ReferenceModel(spec, tensors, np.float64)._feed_forward(part, _inputs(3))).all()
