"""A backend refuses, by name and layer, kinds of parts and caches that it does not run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybrid_spec import hybrid_spec
from realizar.backends.supported import Supported
from realizar.cache_kinds import FullCache, StateCache, WindowCache
from realizar.errors import UnsupportedModelError
from realizar.models.mixers import ShortConvolution
from realizar.models.spec import Attention, Experts, FeedForward, Layer

DENSE = Supported(
    "the test backend", frozenset({Attention}), frozenset({FeedForward}), frozenset({FullCache, WindowCache})
)
ALL = Supported(
    "the test backend",
    frozenset({Attention, ShortConvolution}),
    frozenset({FeedForward, Experts}),
    frozenset({FullCache, WindowCache, StateCache}),
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
        (
            replace(ALL, caches=frozenset({FullCache, WindowCache})),
            r"^hybrid: layer 2 has a cache of a state of fixed size, which the test backend does not keep$",
        ),
        (
            replace(ALL, caches=frozenset({FullCache, StateCache})),
            r"layer 1 has a cache of keys and values of a window of tokens, which",
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
