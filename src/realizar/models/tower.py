"""`Tower`: the description of an encoder of images, which backends interpret. Standard library only.

Canonical tensor names are those of a decoder (`model.layers.0.self_attn.q_proj.weight`), whatever the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from realizar.models.parts import Activation, Linear, Norm
from realizar.models.spec import FeedForward, Layer, LayerStack, vectors_of
from realizar.models.tensor_source import TensorName, TensorSource

Colour = tuple[float, float, float]
"""Of red, green and blue."""
Stretches = Literal["corners", "pixels", "cubics"]


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
    squares of patches, and where these have more than `most` pixels it is reduced to as many; None is any number.
    """

    edge: int
    mean: Colour
    deviation: Colour
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Fitted:
    """How an image becomes one picture: its edges are rounded to whole squares of patches, and where it has less than
    `least` or more than `most` pixels then, it is enlarged or reduced to as many. Where it `widens`, an image with an
    edge that is shorter than a square's is enlarged before that until it is as long.
    """

    least: int
    most: int
    mean: Colour
    deviation: Colour
    widens: bool = False


@dataclass(frozen=True, slots=True)
class Stretched:
    """How an image becomes one picture: it is stretched to a square whose edges have `edge` pixels."""

    edge: int
    mean: Colour
    deviation: Colour


@dataclass(frozen=True, slots=True)
class Grid:
    """How an image becomes pictures: it is stretched to a grid of tiles, whose edges have `tile` pixels, and cut into
    these; the last picture is the whole image, as `whole` makes it.

    Of all `grids`, columns and rows in the order of their numbers of tiles, that counts whose width over height is
    nearest to the image's. An image that has at most `uncut` pixels, in whole squares of patches, or whose grid is one
    tile, is the last picture alone.
    """

    tile: int
    grids: tuple[tuple[int, int], ...]
    uncut: float
    whole: Fitted | Stretched
    filter: Literal["bicubic", "bilinear"]

    @property
    def mean(self) -> Colour:
        return self.whole.mean

    @property
    def deviation(self) -> Colour:
        return self.whole.deviation


@dataclass(frozen=True, slots=True)
class Budgeted:
    """How an image becomes one picture: it is enlarged or reduced to the most whole squares that have `patches` at most
    and about its ratio.
    """

    patches: int
    mean: Colour
    deviation: Colour


@dataclass(frozen=True, slots=True)
class Standard:
    """y = (x * scale - shift) * factor, without shift and factor where these are None; then y is divided by its root
    mean square, with `eps` added before the root.
    """

    scale: float
    eps: float
    shift: TensorName | None = None
    factor: TensorName | None = None


@dataclass(frozen=True, slots=True)
class Projector:
    """What makes features for a text model of squares of patches:
    second(activation(inner_norm(first(reduction(norm(standard(x))))))).

    x are the patches of a square side by side, row by row; or, where it `reads` channels, each of their features of all
    patches, one feature after another; or the mean of the patches. What is None is left out; without `second` there is
    no activation.
    """

    first: Linear
    activation: Activation | None = None
    second: Linear | FeedForward | None = None
    reduction: Linear | None = None
    norm: Norm | None = None
    inner_norm: Norm | None = None
    standard: Standard | None = None
    reads: Literal["patches", "channels", "mean"] = "patches"

    @property
    def num_features(self) -> int:
        return self.linears()[-1].out_features

    def linears(self) -> tuple[Linear, ...]:
        """In the order in which they are multiplied."""
        last = self.second.linears() if isinstance(self.second, FeedForward) else (self.second,)
        every = (self.reduction, self.first, *last)
        return tuple(linear for linear in every if linear is not None)

    def norms(self) -> tuple[Norm, ...]:
        return tuple(norm for norm in (self.norm, self.inner_norm) if norm is not None)


@dataclass(frozen=True, slots=True)
class Tower(LayerStack):
    """An encoder of images. The patches of a picture, in rows, are its tokens:

    x = input_norm(patches(colours)) + positions, through the layers, in which all tokens of a picture see each other
    features = projector(squares of final_norm(x)), row by row, and of the stream after some layers by others

    Where attention has a window, the picture is cut into windows of so many rows and columns of patches, from the first
    on, and the patches of each see each other.

    Attributes:
        architecture: llama.cpp's name of the projector.
        patch_size: pixels of a patch's edge.
        max_patches: of a picture.
        merge: patches of the edge of a square that becomes one feature.
        patches: read a patch's colours, [3, frames, patch_size, patch_size], all of whose frames are one; their outputs
            are added up. With `by_pixel` they read [patch_size, patch_size, 3].
        final_norm: None where there is none.
        positions: [side ** 2, hidden_size], of the patches of a picture with so many rows and columns; None where there
            are none to add. A rope's positions are a patch's row and column.
        class_token: [hidden_size], of a token beside the patches, which no projector reads, and whose position is the
            first of one more. None where there is none.
        stretches: pictures of other sizes have positions between these: bilinear with the corners in place; as Pillow
            resizes pixels, bilinear and smoothed where they become fewer; or by cubics between the middles of patches,
            as torch has them (a = -0.75). None where there are no such pictures.
        by_axis: positions are [2 * side, hidden_size] instead, of columns and then of rows: a patch adds both of its.
        deepstack: layers, and the projectors of the stream after each: the text model adds these features to its stream
            after its first layers, one after another.
        spreads: the text model's rope gives features positions of three axes: all have that of the first on one, and
            their rows and columns beyond it on the others. The text after them goes on beyond the largest.
        preparation: how an image becomes pictures.
        seen_whole: the text model's tokens of an image see each other (`PromptEmbeddings.is_seen_whole`).
    """

    architecture: str
    patch_size: int
    max_patches: int
    merge: int
    hidden_size: int
    patches: tuple[Linear, ...]
    positions: TensorName | None
    layers: tuple[Layer, ...]
    final_norm: Norm | None
    projector: Projector
    preparation: Tiles | Whole | Fitted | Stretched | Grid | Budgeted
    input_norm: Norm | None = None
    class_token: TensorName | None = None
    side: int = 0
    by_pixel: bool = False
    stretches: Stretches | None = None
    by_axis: bool = False
    deepstack: tuple[tuple[int, Projector], ...] = ()
    spreads: bool = False
    seen_whole: bool = False
    tensors: Mapping[TensorName, TensorSource] = field(default_factory=dict)
    ignored_tensors: frozenset[str] = frozenset()

    @property
    def max_tokens(self) -> int:
        """Of a picture."""
        return self.max_patches + (self.class_token is not None)

    @property
    def projectors(self) -> tuple[Projector, ...]:
        """All of them, in the order in which features of one square follow each other."""
        return (self.projector, *(each for _, each in self.deepstack))

    @property
    def num_features(self) -> int:
        """Of a square, those of all projectors: what a request brings for a token."""
        return sum(each.num_features for each in self.projectors)

    def matrices(self) -> tuple[Linear, ...]:
        layers = (linear for layer in self.layers for linear in layer.linears())
        return (*self.patches, *layers, *(linear for each in self.projectors for linear in each.linears()))

    def vectors(self) -> tuple[TensorName, ...]:
        norms = (self.input_norm, self.final_norm, *(norm for each in self.projectors for norm in each.norms()))
        own = [name for norm in norms if norm is not None for name in vectors_of(norm)]
        own += [] if self.class_token is None else [self.class_token]
        standards = (each.standard for each in self.projectors if each.standard is not None)
        own += [name for each in standards for name in (each.shift, each.factor) if name is not None]
        return (*own, *(name for layer in self.layers for name in layer.vectors()))

    def tables(self) -> dict[TensorName, float]:
        return {} if self.positions is None else {self.positions: 1.0}
