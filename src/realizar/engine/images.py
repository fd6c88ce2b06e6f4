"""`ImageReader` makes tokens and pictures of the images in a prompt, whose embeddings the engine makes."""

from __future__ import annotations

import hashlib
import io
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from realizar.checkpoint.checkpoint import Checkpoint
from realizar.config import EngineConfig
from realizar.engine.given_embeddings import PLACEHOLDER
from realizar.errors import CheckpointError, ContextLengthError, InvalidRequestError, UnsupportedModelError
from realizar.images.decode import Cut
from realizar.images.given import EncodedImage, GivenImage, pictures_of
from realizar.images.prepare import (
    ANY_SIZE,
    MOST_IMAGE_BYTES,
    LargestImage,
    Layout,
    PixelBounds,
    bounded,
    cut_of,
    feature_bytes,
    feature_of,
    largest_image,
    layout_of,
    mark_of,
    template_texts,
    with_low_detail,
    with_most_tokens,
)
from realizar.models.check_tensors import check_tensors
from realizar.models.tower import Tower
from realizar.models.towers.find import find_tower
from realizar.request import Picture, PromptEmbeddings
from realizar.sizes import format_bytes
from realizar.tokenizer.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)
_MODES_OF_PNG = frozenset({"1", "L", "LA", "P", "I", "I;16", "RGB", "RGBA"})  # Pillow's
_KEPT_BYTES = 64 << 20  # of pictures that later turns of a conversation may show again

Kept = tuple[PromptEmbeddings, ...]
"""The runs of an image's pictures, each as at the beginning of a prompt."""


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image of a prompt, which is decoded when its turn comes.

    Attributes:
        starts: numbers of prompt tokens before each run of its embeddings: those of a picture, or of a row of one.
        cut: how it becomes pictures. key: SHA-256 of its bytes and of that.
        found: its pictures, where they were kept; None where it is to be decoded.
    """

    image: EncodedImage
    starts: tuple[int, ...]
    cut: Cut
    key: bytes
    found: Kept | None = field(default=None, repr=False)


class ImageReader:
    """Reads the images of one model, of whose tower it knows the description alone. Threads may share it.

    Raises:
        CheckpointError: a tensor of the tower is missing, left over or of the wrong shape.
        UnsupportedModelError: the vocabulary has no token for images.
    """

    def __init__(self, checkpoint: Checkpoint, tower: Tower, tokenizer: Tokenizer) -> None:
        check_tensors(tower, checkpoint)
        self.tower, self._tokenizer = tower, tokenizer
        marks, features = (tokenizer.encode(text, add_special=False) for text in (mark_of(tower), feature_of(tower)))
        if len(marks) != 1:
            raise UnsupportedModelError(f"{checkpoint.path}: the vocabulary has no token {mark_of(tower)}")
        self._mark = marks[0]
        self._feature = features[0] if len(features) == 1 else PLACEHOLDER  # which vocabularies of GGUF files may lack
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    @property
    def largest(self) -> LargestImage:
        return largest_image(self.tower)

    @property
    def template_texts(self) -> Mapping[str, str]:
        """Of `ChatTemplate`, for the model's prompts."""
        return template_texts(self.tower)

    def expand(
        self, token_ids: Sequence[int], images: Sequence[EncodedImage], bounds: PixelBounds = ANY_SIZE
    ) -> tuple[list[int], list[tuple[int, ...]], bytes]:
        """A prompt whose mark of each image is replaced by the image's tokens; `starts` of each image; and the prompt's
        `Request.rope_positions`.

        InvalidRequestError: the chat template wrote another number of marks; also as `bounded`. ContextLengthError: all
        images take too much memory.
        """
        count = token_ids.count(self._mark)
        if count != len(images):
            raise InvalidRequestError(f"the model's chat template shows {count} of {len(images)} images", "messages")
        expanded: list[int] = []
        grids: dict[int, tuple[int, int]] = {}
        starts: list[tuple[int, ...]] = []
        waiting = iter(images)
        for token_id in token_ids:
            if token_id != self._mark:
                expanded.append(token_id)
                continue
            image = next(waiting)
            layout, places = self._layout(image, bounds), []
            before, *others = layout.text.split(feature_of(self.tower))
            expanded += self._tokenizer.encode(before, add_special=False)
            for text, run in zip(others, layout.runs, strict=True):
                places.append(len(expanded))
                if layout.grid is not None:
                    grids[len(expanded)] = layout.grid
                expanded += [self._feature] * run + self._tokenizer.encode(text, add_special=False)
            starts.append(tuple(places))
        if (size := self.image_bytes(expanded)) > MOST_IMAGE_BYTES:
            taken, most = format_bytes(size), format_bytes(MOST_IMAGE_BYTES)
            message = f"the prompt's images take {taken} to encode, so the prompt is too long: {most} are allowed"
            raise ContextLengthError(message, "messages")
        return expanded, starts, _positions(len(expanded), grids)

    def _tower_for(self, image: EncodedImage, bounds: PixelBounds) -> Tower:
        tower = bounded(self.tower, bounds)
        return with_low_detail(tower) if image.low else tower

    def _layout(self, image: EncodedImage, bounds: PixelBounds) -> Layout:
        tower = self._tower_for(image, bounds)
        try:
            return layout_of(tower, image.width, image.height)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{image.where} can't be read: {error}", image.where) from None

    def image_bytes(self, token_ids: Sequence[int]) -> int:
        """Bytes that a prompt's images, whose tokens are in their places, take until the answer ends, at most."""
        return feature_bytes(self.tower) * token_ids.count(self._feature)

    def prepare(self, image: EncodedImage, starts: tuple[int, ...], bounds: PixelBounds = ANY_SIZE) -> PlacedImage:
        """Find an image's pictures, if they are kept; nothing is decoded. `bounds` are those of `expand`."""
        cut = cut_of(self._tower_for(image, bounds), image.width, image.height)
        key = hashlib.sha256(f"{cut}".encode() + image.data).digest()
        return PlacedImage(image, starts, cut, key, self._find(key))

    def _find(self, key: bytes) -> Kept | None:
        with self._lock:
            return self._kept.get(key)

    def pictures(
        self, images: Sequence[PlacedImage], check: Callable[[], None] = lambda: None
    ) -> tuple[PromptEmbeddings, ...]:
        """The pictures of a prompt's images, ascending. This takes as long as decoding does, seconds at times.

        `check` is called before each image, and ends the work by an exception. Raises InvalidRequestError for a
        malformed one, and EngineUnavailableError as `pictures_of`.
        """
        runs = []
        for image in images:
            check()
            found = image.found or self._find(image.key) or self._made(image)
            self._keep(image.key, found)
            runs += [replace(run, start=start) for run, start in zip(found, image.starts, strict=True)]
        return tuple(runs)

    def _made(self, image: PlacedImage) -> Kept:
        """A token's digest is that of the picture and the token's place in it. The picture's size is part of it, as
        positions follow from that.
        """
        pictures = pictures_of(image.image, image.cut)
        num_runs, square = len(image.starts) // len(pictures), self.tower.patch_size * self.tower.merge
        made: list[PromptEmbeddings] = []
        for pixels in pictures:
            height, width, _ = pixels.shape
            picture = Picture(pixels.tobytes(), height, width, num_runs)
            key = hashlib.sha256(f"{height} x {width} ".encode() + picture.pixels).digest()
            names = [
                hashlib.sha256(key + place.to_bytes(4, "little")).digest()
                for place in range(height // square * (width // square))
            ]
            length = len(names) // num_runs
            for start in range(0, len(names), length):
                digests = b"".join(names[start : start + length])
                made.append(PromptEmbeddings(0, b"", digests, self.tower.seen_whole, None if start else picture))
        return tuple(made)

    def _keep(self, key: bytes, made: Kept) -> None:
        """The pictures of images that were used last stay, up to a bound."""
        with self._lock:
            if key not in self._kept:
                self._kept_bytes += _size(made)
            self._kept[key] = made
            self._kept.move_to_end(key)
            while self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= _size(self._kept.popitem(last=False)[1])


def check_bounds(reader: ImageReader | None, bounds: PixelBounds) -> None:
    """Raise InvalidRequestError as `bounded`, or where a model reads no images, whether or not a prompt has some."""
    if bounds == ANY_SIZE:
        return
    if reader is None:
        name = "mm_processor_kwargs"
        raise InvalidRequestError(f"{name} is not supported: the model reads text only", name)
    bounded(reader.tower, bounds)


def check_room(num_tokens: int, max_tokens: int) -> None:
    """ContextLengthError: a prompt with its images, before any of them is decoded, is longer than the context."""
    if num_tokens > max_tokens:
        raise ContextLengthError(
            f"messages with their images have {num_tokens} tokens, so the prompt is too long: this model's maximum"
            f" context length is {max_tokens} tokens",
            "messages",
        )


def open_images(checkpoint: Checkpoint, tokenizer: Tokenizer, config: EngineConfig) -> ImageReader | None:
    """What reads the images of a model, as `EngineConfig` says. None where nothing does: a tower that was not named and
    does not run is logged, and the text model runs without.

    UnsupportedModelError, CheckpointError: a tower that was named does not run, or is of another model.
    InvalidRequestError: it always makes more than `image_max_tokens`.
    """
    try:
        if (found := find_tower(checkpoint, config.mmproj)) is None:
            return None
        holder, tower = found
        return ImageReader(holder, with_most_tokens(tower, config.image_max_tokens), tokenizer)
    except (CheckpointError, UnsupportedModelError) as error:
        if config.mmproj != "auto":
            raise
        _LOG.warning("the model reads no images: %s", error)
        return None


def given_images(messages: Sequence[Any]) -> list[Any]:
    """A conversation whose images are `GivenImage`: those of parts `{"type": "image", "image": ...}` of a path, of
    bytes or of a Pillow image, and of OpenAI's `{"type": "image_url", "image_url": {"url": "data:..."}}`.

    InvalidRequestError: one can't be read.
    """

    def given(part: Any, where: str) -> Any:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "image_url":
            url = part.get("image_url")
            text = url.get("url") if isinstance(url, Mapping) else url
            if not isinstance(text, str):
                raise InvalidRequestError(f"{where}.image_url must be text or have a url", where)
            low = isinstance(url, Mapping) and url.get("detail") == "low"
            return {"type": "image", "image": GivenImage(where, url=text, low=low)}
        if kind == "image":
            image = part.get("image")
            named = f"{where} ({Path(image).name})" if isinstance(image, str | Path) else where
            return {"type": "image", "image": GivenImage(named, _bytes_of(image, named))}
        return part

    def with_given(place: int, message: Any) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            return message
        parts = [given(part, f"messages[{place}].content[{index}]") for index, part in enumerate(content)]
        return {**message, "content": parts}

    return [with_given(place, message) for place, message in enumerate(messages)]


def _bytes_of(image: Any, where: str) -> bytes:
    if isinstance(image, bytes):
        return image
    try:
        if isinstance(image, str | Path):
            return Path(image).read_bytes()
        buffer = io.BytesIO()
        (image if image.mode in _MODES_OF_PNG else image.convert("RGB")).save(buffer, "PNG")
        return buffer.getvalue()
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise InvalidRequestError(f"{where} can't be read: {reason}", where) from None
    except AttributeError:
        kind = type(image).__name__
        raise InvalidRequestError(f"{where} must be a path, bytes or a Pillow image, not {kind}", where) from None


def take_images(messages: Sequence[Any]) -> tuple[list[Any], list[GivenImage]]:
    """A conversation with marks in place of images, as templates take them, and the images: parts
    `{"type": "image", "image": GivenImage}`.
    """
    images: list[GivenImage] = []

    def marked(part: Any) -> Any:
        image = part.get("image") if isinstance(part, Mapping) else None
        if not isinstance(image, GivenImage):
            return part
        images.append(image)
        return {"type": "image"}

    def with_marks(message: Any) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        return {**message, "content": [marked(part) for part in content]} if isinstance(content, list) else message

    return [with_marks(message) for message in messages], images


def _positions(count: int, grids: Mapping[int, tuple[int, int]]) -> bytes:
    """`Request.rope_positions` of so many tokens, with grids of features by their first token; empty without any."""
    if not grids:
        return b""
    found, token, place = np.zeros((3, count), np.int32), 0, 0
    for start, (rows, columns) in sorted(grids.items()):
        found[:, token:start] = np.arange(place, place + start - token)
        place, end = place + start - token, start + rows * columns
        found[0, start:end] = place
        found[1:, start:end] = place + np.indices((rows, columns)).reshape(2, -1)
        token, place = end, place + max(rows, columns)
    found[:, token:] = np.arange(place, place + count - token)
    return found.tobytes()


def _size(made: Kept) -> int:
    pixels = sum(len(run.picture.pixels) for run in made if run.picture is not None)
    return pixels + sum(len(run.digests) for run in made)
