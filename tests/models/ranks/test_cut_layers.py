"""Spans of a model's layers, one after another, are the model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from random_models import Recipe, random_model
from realizar.errors import UnsupportedModelError
from realizar.models.check_tensors import check_tensors
from realizar.models.cut_layers import cut_layers
from realizar.models.mixers import SharedAttention

_WINDOWS = (40, None, 40, None)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(windows=_WINDOWS, parts=("biases", "qk_norm", "sinks")),
        Recipe(windows=_WINDOWS, experts=4, parts=("expert_biases",)),
        Recipe(windows=_WINDOWS, recurrent=("delta", None, "convolution", None)),
    ],
    ids=["dense", "experts", "states"],
)
def test_spans_have_all_layers_and_their_tensors(recipe: Recipe) -> None:
    spec, checkpoint = random_model(recipe)
    first, last = cut_layers(spec, 0, 2), cut_layers(spec, 2, 4)
    assert first.layers + last.layers == spec.layers
    for span in (first, last):
        check_tensors(span, checkpoint)
    assert first.vocab_size == first.head.out_features == 32
    assert last.head == spec.head
    assert last.vocab_size == spec.vocab_size
    of_layers = {name for name in spec.tensors if name.startswith("layers.")}
    assert not first.tensors.keys() & last.tensors.keys() & of_layers
    assert of_layers <= first.tensors.keys() | last.tensors.keys()
    assert cut_layers(spec, 0, 4) is spec


def test_keys_and_values_stay_with_those_that_read_them() -> None:
    spec, _ = random_model(Recipe(windows=(None,) * 4, sources=(None, None, None, 2)))
    (_, reader) = cut_layers(spec, 2, 4).layers
    assert isinstance(reader.mixer, SharedAttention)
    assert reader.mixer.source == 0
    with pytest.raises(UnsupportedModelError, match="layer 3 reads the keys and values of layer 2, which another"):
        cut_layers(spec, 3, 4)


def test_layers_that_read_more_than_the_stream_are_refused() -> None:
    spec, _ = random_model(Recipe(windows=(None, None), input_size=32))
    with pytest.raises(UnsupportedModelError, match="layers have inputs of their own"):
        cut_layers(spec, 0, 1)
    spec, _ = random_model(Recipe(windows=_WINDOWS, recurrent=("delta", "delta", None, None)))
    with pytest.raises(UnsupportedModelError, match="none of layers 0 to 1 has attention"):
        cut_layers(spec, 0, 2)
    spec, _ = random_model(Recipe(windows=_WINDOWS))
    seeing = replace(spec, deepstack=3)
    for first, stop in ((0, 2), (2, 4)):
        with pytest.raises(UnsupportedModelError, match="added to the first 3 layers"):
            cut_layers(seeing, first, stop)
    assert cut_layers(seeing, 0, 3).deepstack == 3
    assert cut_layers(seeing, 3, 4).deepstack == 0
