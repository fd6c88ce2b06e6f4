"""`Tower`: the description of an encoder of images, which backends interpret. Standard library only.

Canonical tensor names are those of a decoder (`model.layers.0.self_attn.q_proj.weight`), whatever the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from realizar.models.parts import Activation, Linear, Norm
from realizar.models.spec import Layer, LayerStack, vectors_of
from realizar.models.tensor_source import TensorName, TensorSource

Colour = tuple[float, float, float]
"""Of red, green and blue."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How an image becomes pictures: it is enlarged or reduced until its longer edge has `edge` pixels, stretched to
    whole tiles, and cut into these; the last picture is the whole image in the size of a tile.

    An image that fits into one tile is one picture. Colours, 0 to 1, lose `mean` and are divided by `deviation`.
    """

    edge: int
    tile: int
    mean: Colour
    deviation: Colour


@dataclass(frozen=True, slots=True)
class Whole:
    """How an image becomes one picture: where an edge has more than `edge` pixels it is reduced, and stretched to whole
    squares of patches.
    """

    edge: int
    mean: Colour
    deviation: Colour


@dataclass(frozen=True, slots=True)
class Projector:
    """What makes features for a text model of squares of patches: second(activation(first(reduction(x)))).

    x are the patches of a square side by side, row by row; `by_channel` has each of their features of all patches
    instead, one feature after another. What is None is left out; without `second` there is no activation.
    """

    first: Linear
    activation: Activation | None = None
    second: Linear | None = None
    reduction: Linear | None = None
    by_channel: bool = False

    @property
    def num_features(self) -> int:
        return (self.first if self.second is None else self.second).out_features

    def linears(self) -> tuple[Linear, ...]:
        """In the order in which they are multiplied."""
        every = (self.reduction, self.first, self.second)
        return tuple(linear for linear in every if linear is not None)


@dataclass(frozen=True, slots=True)
class Tower(LayerStack):
    """An encoder of images. The patches of a picture, in rows, are its tokens:

    x = input_norm(patches(colours) + positions), through the layers, in which all patches of a picture see each other
    features = projector(squares of final_norm(x)), row by row

    Attributes:
        architecture: llama.cpp's name of the projector.
        patch_size: pixels of a patch's edge.
        max_patches: of a picture.
        merge: patches of the edge of a square that becomes one feature.
        patches: reads a patch's colours, [3, patch_size, patch_size].
        positions: [max_patches, hidden_size], of pictures that have all of them; None where there are none to add. A
            rope's positions are a patch's row and column.
        preparation: how an image becomes pictures.
    """

    architecture: str
    patch_size: int
    max_patches: int
    merge: int
    hidden_size: int
    patches: Linear
    positions: TensorName | None
    layers: tuple[Layer, ...]
    final_norm: Norm
    projector: Projector
    preparation: Tiles | Whole
    input_norm: Norm | None = None
    tensors: Mapping[TensorName, TensorSource] = field(default_factory=dict)
    ignored_tensors: frozenset[str] = frozenset()

    def matrices(self) -> tuple[Linear, ...]:
        layers = (linear for layer in self.layers for linear in layer.linears())
        return (self.patches, *layers, *self.projector.linears())

    def vectors(self) -> tuple[TensorName, ...]:
        first = () if self.input_norm is None else vectors_of(self.input_norm)
        return (*first, *(name for layer in self.layers for name in layer.vectors()), *vectors_of(self.final_norm))

    def tables(self) -> dict[TensorName, float]:
        return {} if self.positions is None else {self.positions: 1.0}
