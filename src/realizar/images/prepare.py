"""Images as pictures, as a tower's preparation describes it, and as text for a tokenizer.

Pictures, made by Pillow, have the pixels of transformers' processors that use it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from realizar.errors import InvalidRequestError
from realizar.images.decode import Cut
from realizar.images.given import Pixels
from realizar.models.tower import Budgeted, Fitted, Grid, Stretched, Tiles, Tower, Whole

_MOST = 4096  # pixels of the longer edge, whatever a configuration of tiles says
_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"
_END_OF_ROW, _END = "[IMG_BREAK]", "[IMG_END]"
_STRETCHED, _END_OF_STRETCHED = "<start_of_image>", "<end_of_image>"
_FEATURES = {Stretched: "<image_soft_token>", Budgeted: "<pad>"}  # of layers' own inputs Gemma 4 adds those of padding
_STEEPEST = 200  # of edges, the longer over the shorter one, that are fitted
MOST_IMAGE_BYTES = 240 << 20
"""Of a prompt's images, by `feature_bytes`: their pixels have to fit into a frame between processes."""
_LOW = 512**2  # pixels, as OpenAI's `detail: low` has them
_LEAST, _MOST_GIVEN = "mm_processor_kwargs.min_pixels", "mm_processor_kwargs.max_pixels"


class _GridTexts(NamedTuple):
    """What stands in a prompt for an image of a `Grid`: a mark for each picture, and what stands around them."""

    mark: str
    start: str
    tile: str
    whole: str
    end: str


_GRIDS = {
    "lfm2": _GridTexts(
        "<image>", "<|image_start|>", "<|img_row_{row}_col_{column}|>", "<|img_thumbnail|>", "<|image_end|>"
    ),
    "internvl": _GridTexts("<IMG_CONTEXT>", "<img>", "", "", "</img>"),
}


_MARKS = {
    "idefics3": "<image>",
    "gemma3": _STRETCHED,
    "gemma4v": "<|image|>",
    "pixtral": "[IMG]",
    "glm4v": "<|image|>",
    **dict.fromkeys(("qwen2.5vl_merger", "qwen3vl_merger"), "<|image_pad|>"),
    **{name: texts.mark for name, texts in _GRIDS.items()},
}


@dataclass(frozen=True, slots=True)
class Layout:
    """An image of a prompt as text, with `feature_of` for each run of its features, and how many each run has.

    `grid` are the rows and columns of features whose positions spread over axes; None where they follow each other.
    """

    text: str
    runs: tuple[int, ...]
    grid: tuple[int, int] | None = None


class LargestImage(NamedTuple):
    """What an image may have and is not reduced, in pixels: `edge` is its longer edge; None is any number."""

    edge: int | None
    pixels: int | None


def largest_image(tower: Tower) -> LargestImage:
    preparation = tower.preparation
    if isinstance(preparation, Fitted):
        return LargestImage(None, preparation.most)
    if isinstance(preparation, Budgeted):
        return LargestImage(None, preparation.patches * tower.patch_size**2)
    if isinstance(preparation, Stretched | Grid):
        return LargestImage(None, None)  # a client keeps the ratio, and would reduce an edge that is enlarged here
    if isinstance(preparation, Tiles):
        return LargestImage(min(preparation.edge, _MOST), None)
    return LargestImage(preparation.edge, preparation.most)


@dataclass(frozen=True, slots=True)
class PixelBounds:
    """How many pixels an image has once it is resized, at least and at most; None is as the model has it."""

    least: int | None = None
    most: int | None = None


ANY_SIZE = PixelBounds()


def read_bounds(given: object) -> PixelBounds:
    """What vLLM's `mm_processor_kwargs` set: `min_pixels` and `max_pixels`. InvalidRequestError for anything else."""
    if not isinstance(given, Mapping | None):
        raise InvalidRequestError("mm_processor_kwargs must be an object", "mm_processor_kwargs")
    values = {f"mm_processor_kwargs.{ascii(str(name)[:80])[1:-1]}": value for name, value in (given or {}).items()}
    for name, value in values.items():
        if name not in (_LEAST, _MOST_GIVEN):
            raise InvalidRequestError(f"{name} is not supported: min_pixels and max_pixels are", name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and value >= 1 and value % 1 == 0):
            raise InvalidRequestError(f"{name} must be a whole number from 1 on", name)
    least, most = (None if (value := values.get(name)) is None else int(value) for name in (_LEAST, _MOST_GIVEN))
    return PixelBounds(least, most)


def bounded(tower: Tower, bounds: PixelBounds) -> Tower:
    """A tower that reads images within bounds, and no larger than it did.

    InvalidRequestError, naming the key of `mm_processor_kwargs`: it reads no image as so few pixels, or as so many.
    """
    preparation, least, most = tower.preparation, bounds.least, bounds.most
    if most is not None and most < (fewest := _fewest_pixels(tower)):
        message = f"{_MOST_GIVEN} must be at least {fewest}: this model reads no image as fewer pixels"
        raise InvalidRequestError(message, _MOST_GIVEN)
    if isinstance(preparation, Fitted):
        most = min(preparation.most, most or preparation.most)
        least = least or min(preparation.least, most)
        if least > most:
            raise InvalidRequestError(f"{_LEAST} must be at most {most}, the most that is read of an image", _LEAST)
        return replace(tower, preparation=replace(preparation, least=least, most=most))
    if least is not None:
        raise InvalidRequestError(f"{_LEAST} is not supported by this model: it has no least size of an image", _LEAST)
    if most is None or isinstance(preparation, Stretched):
        return tower
    if isinstance(preparation, Budgeted):
        patches = min(preparation.patches, most // tower.patch_size**2)
        return replace(tower, preparation=replace(preparation, patches=patches))
    if isinstance(preparation, Whole):
        return replace(tower, preparation=replace(preparation, most=min(most, preparation.most or most)))
    if isinstance(preparation, Grid):
        return replace(tower, preparation=_bounded_grid(preparation, most))
    tiles = math.isqrt(max(most // preparation.tile**2 - 1, 1))  # along an edge, beside the whole
    return replace(tower, preparation=replace(preparation, edge=min(preparation.edge, tiles * preparation.tile)))


def _bounded_grid(grid: Grid, most: int) -> Grid:
    """The last picture comes first; the tiles have what it leaves."""
    whole = grid.whole
    if isinstance(whole, Fitted):
        whole = replace(whole, least=min(whole.least, most), most=min(whole.most, most))
    left = most - (whole.edge**2 if isinstance(whole, Stretched) else whole.most)
    grids = tuple(each for each in grid.grids if math.prod(each) * grid.tile**2 <= left)
    return replace(grid, grids=grids, uncut=grid.uncut if grids else math.inf, whole=whole)


def with_most_tokens(tower: Tower, most: int | None) -> Tower:
    """A tower that makes so many features of an image, at most, and of any size no more than a prompt may bring.

    InvalidRequestError: it always makes more.
    """
    if isinstance(tower.preparation, Fitted):
        fits = MOST_IMAGE_BYTES // feature_bytes(tower)
        most = fits if most is None else min(most, fits)
    if most is None:
        return tower
    square = (tower.patch_size * tower.merge) ** 2
    if most < (fewest := _fewest_pixels(tower) // square):
        message = (
            f"image_max_tokens must be at least {fewest}, not {most}: {tower.architecture} reads no image as fewer"
        )
        raise InvalidRequestError(message, "image_max_tokens")
    return bounded(tower, PixelBounds(most=most * square))


def with_low_detail(tower: Tower) -> Tower:
    """A tower that reads images as 512 x 512 pixels, at most, or the fewest as which it reads any."""
    return bounded(tower, PixelBounds(most=max(_LOW, _fewest_pixels(tower))))


def _fewest_pixels(tower: Tower) -> int:
    """As which it reads any image."""
    preparation = tower.preparation
    if isinstance(preparation, Tiles):
        return preparation.tile**2
    whole = preparation.whole if isinstance(preparation, Grid) else preparation
    if isinstance(whole, Stretched):
        return whole.edge**2
    return int(tower.patch_size * tower.merge) ** 2


def mark_of(tower: Tower) -> str:
    """The control token that chat templates write for an image."""
    return _MARKS[tower.architecture]


def feature_bytes(tower: Tower) -> int:
    """Bytes that a request brings for a token of an image, or has once it is encoded: its pixels or its embedding."""
    return max(3 * (tower.patch_size * tower.merge) ** 2, 4 * tower.num_features)


def feature_of(tower: Tower) -> str:
    """The control token that stands for a feature."""
    return _FEATURES.get(type(tower.preparation), mark_of(tower))


def template_texts(tower: Tower) -> dict[str, str]:
    """What a prompt has in place of texts of its chat template, before it becomes tokens."""
    if isinstance(tower.preparation, Stretched):
        return {_STRETCHED: f"\n\n{_STRETCHED}{_END_OF_STRETCHED}\n\n"}
    return {}


def layout_of(tower: Tower, width: int, height: int) -> Layout:
    """The layout of an image of so many pixels."""
    mark, preparation, square = mark_of(tower), tower.preparation, tower.patch_size * tower.merge
    if isinstance(preparation, Stretched):
        return Layout(mark + feature_of(tower), ((preparation.edge // square) ** 2,))
    if isinstance(preparation, Tiles):
        rows, columns = _tile_grid(preparation, width, height)
        text = "".join(_of_tiles(mark, rows, columns))
        return Layout(text, ((preparation.tile // square) ** 2,) * (rows * columns + 1))
    if isinstance(preparation, Grid):
        rows, columns = _grid(preparation, tower, width, height)
        whole_width, whole_height = _whole_of_grid(preparation, tower, width, height)
        runs = ((preparation.tile // square) ** 2,) * (rows * columns)
        text = "".join(_of_grid(_GRIDS[tower.architecture], rows, columns))
        return Layout(text, (*runs, whole_width // square * (whole_height // square)))
    if isinstance(preparation, Budgeted):
        own_width, own_height = _budgeted_size(preparation, tower, width, height)
        return Layout(f"<|image>{feature_of(tower)}<image|>", (own_width // square * (own_height // square),))
    if isinstance(preparation, Fitted):
        fitted_width, fitted_height = _fitted_size(preparation, square, width, height)
        rows, columns = fitted_height // square, fitted_width // square
        return Layout(mark, (rows * columns,), (rows, columns))
    whole_width, whole_height = _whole_size(preparation, square, width, height)
    marks = [mark] * (whole_height // square)
    return Layout(_END_OF_ROW.join(marks) + _END, (whole_width // square,) * len(marks))


def _of_tiles(mark: str, rows: int, columns: int) -> Iterator[str]:
    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            yield f"{_AROUND}<row_{row}_col_{column}>{mark}"
        yield "\n"
    yield "\n" if rows else ""
    yield f"{_AROUND}{_WHOLE}{mark}{_AROUND}"


def _of_grid(texts: _GridTexts, rows: int, columns: int) -> Iterator[str]:
    yield texts.start
    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            yield texts.tile.format(row=row, column=column) + texts.mark
    yield (texts.whole if rows else "") + texts.mark + texts.end


def cut_of(tower: Tower, width: int, height: int) -> Cut:
    """How an image of so many pixels becomes pictures."""
    preparation = tower.preparation
    if isinstance(preparation, Tiles):
        return Cut(_sizes(preparation, width, height), "lanczos", preparation.tile)
    if isinstance(preparation, Stretched):
        return Cut(((preparation.edge, preparation.edge),), "bilinear")
    square = tower.patch_size * tower.merge
    if isinstance(preparation, Grid):
        rows, columns = _grid(preparation, tower, width, height)
        whole = _whole_of_grid(preparation, tower, width, height)
        if not rows:
            return Cut((whole,), preparation.filter)
        tile = preparation.tile
        return Cut(((columns * tile, rows * tile),), preparation.filter, tile, whole)
    if isinstance(preparation, Budgeted):
        return Cut((_budgeted_size(preparation, tower, width, height),))
    if isinstance(preparation, Whole):
        return Cut((_whole_size(preparation, square, width, height),))
    return Cut((_fitted_size(preparation, square, width, height),))


def patches_of(tower: Tower, picture: Pixels) -> NDArray[np.float32]:
    """Colours of a picture's patches, as `Tower.patches` read them: float32 [rows, columns, colours]."""
    preparation, size = tower.preparation, tower.patch_size
    rows, columns = picture.shape[0] // size, picture.shape[1] // size
    mean, deviation = (np.array(colour, np.float32) for colour in (preparation.mean, preparation.deviation))
    shares = (picture.astype(np.float64) * (1 / 255)).astype(np.float32)
    grid = ((shares - mean) / deviation).reshape(rows, size, columns, size, 3).swapaxes(1, 2)
    if tower.by_pixel:
        return grid.reshape(rows, columns, -1)
    grid = grid.transpose(0, 1, 4, 2, 3)
    frames = tower.patches[0].in_features // (3 * size**2)
    return np.repeat(grid.reshape(rows, columns, 3, size**2), frames, axis=2).reshape(rows, columns, -1)


def _tile_grid(tiles: Tiles, width: int, height: int) -> tuple[int, int]:
    """Rows and columns of an image's tiles; zeros for an image that is one picture."""
    _, (whole_width, whole_height) = _sizes(tiles, width, height)
    if (whole_width, whole_height) == (tiles.tile, tiles.tile):
        return 0, 0
    return whole_height // tiles.tile, whole_width // tiles.tile


def _whole_size(whole: Whole, square: int, width: int, height: int) -> tuple[int, int]:
    """Width and height in whole squares."""
    ratio = max(width, height) / whole.edge
    if ratio > 1:
        width, height = int(width / ratio), int(height / ratio)
    columns, rows = (max(-(-length // square), 1) for length in (width, height))
    if whole.most is not None and columns * rows * square**2 > whole.most:
        return _held_size(whole.most, square, _reduced_size(whole.most, square, width, height))
    return columns * square, rows * square


def _fitted_size(fitted: Fitted, square: int, width: int, height: int) -> tuple[int, int]:
    """Width and height in whole squares; InvalidRequestError for an image that is far longer than wide, or wider."""
    size = f"{width} x {height} pixels"
    if fitted.widens and min(width, height) < square:
        factor = square / min(width, height)
        width, height = int(width * factor), int(height * factor)
    if max(width, height) > _STEEPEST * min(width, height):
        raise InvalidRequestError(f"{size} are too steep: one edge may be {_STEEPEST} times the other", "image")
    return _held_size(fitted.most, square, _bounded_size(fitted, square, width, height, least=0))


def _bounded_size(fitted: Fitted, square: int, width: int, height: int, *, least: int) -> tuple[int, int]:
    """As `_fitted_size`, whatever the edges' ratio; rounded ones have at least so many squares."""
    rounded = [max(round(length / square), least) * square for length in (width, height)]
    pixels = rounded[0] * rounded[1]
    if pixels < fitted.least:
        ratio = math.sqrt(fitted.least / (width * height))
        rounded = [math.ceil(length * ratio / square) * square for length in (width, height)]
        pixels = rounded[0] * rounded[1]
    if pixels > fitted.most:
        return _reduced_size(fitted.most, square, width, height)
    return rounded[0], rounded[1]


def _reduced_size(most: int, square: int, width: int, height: int) -> tuple[int, int]:
    """Width and height in whole squares, which have so many pixels at most, unless one is a single square."""
    ratio = math.sqrt(width * height / most)
    columns, rows = (max(math.floor(length / ratio / square), 1) for length in (width, height))
    return columns * square, rows * square


def _held_size(most: int, square: int, size: tuple[int, int]) -> tuple[int, int]:
    """A reduced size, which has so many pixels at most also where an edge is a single square."""
    width, height = (min(edge, most // square**2 * square) for edge in size)
    return width, height


def _whole_of_grid(grid: Grid, tower: Tower, width: int, height: int) -> tuple[int, int]:
    """Width and height of the last picture; InvalidRequestError where an edge is so short that it has too many."""
    if isinstance(grid.whole, Stretched):
        return grid.whole.edge, grid.whole.edge
    found = _bounded_size(grid.whole, tower.patch_size * tower.merge, width, height, least=1)
    most = min(tower.max_patches * tower.patch_size**2, grid.whole.most)
    if math.prod(found) > most:
        raise InvalidRequestError(f"{width} x {height} pixels are too steep for {most} pixels", "image")
    return found


def _grid(grid: Grid, tower: Tower, width: int, height: int) -> tuple[int, int]:
    """Rows and columns of an image's tiles; zeros for an image that is one picture.

    Of grids that are as near, a later one counts, by their number of tiles, whose tiles have less than twice the
    image's pixels.
    """
    square = tower.patch_size * tower.merge
    rounded = [max(round(length / square) * square, tower.patch_size) for length in (width, height)]
    if rounded[0] * rounded[1] <= grid.uncut:
        return 0, 0
    found, nearest, ratio = (1, 1), math.inf, width / height
    for each in grid.grids:
        distance = abs(ratio - each[0] / each[1])
        pixels = grid.tile**2 * each[0] * each[1]
        if distance < nearest or (distance == nearest and width * height > 0.5 * pixels):
            found, nearest = each, distance
    return (0, 0) if found == (1, 1) else (found[1], found[0])


def _budgeted_size(budgeted: Budgeted, tower: Tower, width: int, height: int) -> tuple[int, int]:
    """Width and height in whole squares; of an image that is too long or wide for its ratio one edge is one square."""
    square = tower.patch_size * tower.merge
    factor = math.sqrt(budgeted.patches * tower.patch_size**2 / (width * height))
    columns, rows = math.floor(factor * width / square), math.floor(factor * height / square)
    most = budgeted.patches // tower.merge**2
    if rows == 0:
        columns, rows = min(width // height, most), 1
    elif columns == 0:
        columns, rows = 1, min(height // width, most)
    return columns * square, rows * square


def _sizes(tiles: Tiles, width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Width and height after the first resizing, which keeps their ratio, and after that to whole tiles."""
    ratio = width / height
    first = _by_longer_edge(tiles.edge, ratio)
    if first[0] % 2 and first[1] == tiles.edge and ratio < 1:
        first = (first[0] + 1, first[1])
    elif first[1] % 2 and ratio >= 1:
        first = (first[0], first[1] + 1)
    first = (max(first[0], 1), max(first[1], 1))
    if max(first) > _MOST:
        first = _by_longer_edge(_MOST, first[0] / first[1])
    ratio = first[0] / first[1]

    def tiled(length: int) -> int:
        return -(-length // tiles.tile) * tiles.tile

    longer = tiled(max(first))
    other = tiled(_by_longer_edge(longer, ratio)[1 if ratio >= 1 else 0])
    return first, (longer, other) if ratio >= 1 else (other, longer)


def _by_longer_edge(longer: int, ratio: float) -> tuple[int, int]:
    """Width and height whose longer one is given, with the ratio of them; the other may be 0."""
    return (longer, int(longer / ratio)) if ratio >= 1 else (int(longer * ratio), longer)
