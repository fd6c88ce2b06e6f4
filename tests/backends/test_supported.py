"""A backend refuses, by name and layer, kinds of parts that it does not run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hybrid_spec import hybrid_spec
from realizar.backends.supported import Feature, Supported
from realizar.errors import UnsupportedModelError
from realizar.models.expert_norms import ExpertNorms
from realizar.models.mixers import ShortConvolution
from realizar.models.parts import Norm
from realizar.models.spec import Attention, Experts, FeedForward, Layer

DENSE = Supported("the test backend", frozenset({Attention}), frozenset({FeedForward}))
ALL = Supported(
    "the test backend",
    frozenset({Attention, ShortConvolution}),
    frozenset({FeedForward, Experts}),
)


def test_what_a_backend_runs_passes() -> None:
    ALL.check(hybrid_spec())
    spec = hybrid_spec()
    DENSE.check(replace(spec, layers=(spec.layers[0], spec.layers[3])))


@pytest.mark.parametrize(
    ("known", "message"),
    [
        (DENSE, r"^hybrid: layers 1, 4 have a mixture of experts, which the test backend does not run$"),
        (
            replace(DENSE, feed_forwards=ALL.feed_forwards),
            r"^hybrid: layer 2 has a short convolution, which the test backend does not run$",
        ),
    ],
)
def test_the_first_unknown_kind_is_named_with_its_layers(known: Supported, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        known.check(hybrid_spec())


def test_many_layers_are_counted_and_a_model_without_attention_is_refused() -> None:
    spec = hybrid_spec()
    with pytest.raises(UnsupportedModelError, match=r"layers 0, 1, 2, 3, 4, 5, 6, 7 and 12 more have a short"):
        DENSE.check(replace(spec, layers=(spec.layers[2],) * 20))
    without = replace(spec, layers=(Layer(None, spec.layers[0].feed_forward),))
    with pytest.raises(UnsupportedModelError, match="hybrid: no layer has attention, which the test backend needs"):
        ALL.check(without)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"gate": None}, "experts without a gate"),
        ({"clamped": True}, "experts with a clamped SwiGLU"),
        ({"scoring": "sigmoid"}, "a router of sigmoids"),
        ({"selection_bias": "bias"}, "a selection bias of experts"),
        ({"num_groups": 2}, "groups of experts"),
        ({"shared": hybrid_spec().layers[0].feed_forward}, "a shared expert"),
        ({"expert_scales": "scales"}, "factors of experts"),
        (
            {"norms": ExpertNorms(*[Norm("rms", 1e-5, "norm")] * 5)},
            "experts beside a dense feed-forward, each with norms",
        ),
        ({"router": replace(hybrid_spec().mixtures()[0][1].router, bias="bias")}, "a router with a bias"),
        ({"down": replace(hybrid_spec().mixtures()[0][1].down, bias="bias")}, "experts with biases"),
    ],
)
def test_what_a_backend_lacks_of_mixtures_is_named(change: dict[str, Any], named: str) -> None:
    """A backend that runs plain ones refuses the rest, never runs them without; one that lists it runs it."""
    spec = hybrid_spec()
    _, experts = spec.mixtures()[0]
    layer = replace(spec.layers[1], feed_forward=replace(experts, **change))
    changed = replace(spec, layers=(*spec.layers[:1], layer, *spec.layers[2:]))
    ALL.check(spec)
    with pytest.raises(
        UnsupportedModelError, match=rf"^hybrid: layer 1 has {named}, which the test backend does not run$"
    ):
        ALL.check(changed)
    replace(ALL, features=frozenset(Feature)).check(changed)
