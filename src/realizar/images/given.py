"""Images as requests bring them, which a process of their own opens and decodes (`decode.py`)."""

from __future__ import annotations

import binascii
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from realizar.errors import InvalidRequestError
from realizar.images.decode import FORMATS, Ask, Cut, Made
from realizar.ipc.apart import Processes, WorkEndedError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Pixels: TypeAlias = "NDArray[np.uint8]"
"""[height, width, 3]: red, green, blue."""

FETCHED: ContextVar[Mapping[str, bytes] | None] = ContextVar("fetched", default=None)
"""Images of other servers, by their URLs, that were fetched for a request."""

MEDIA_TYPES = tuple(f"image/{name.lower()}" for name in FORMATS)
MAX_BYTES = 32 << 20
_LOOK_CPU_S = 2.0
_DECODE_CPU_S = 20.0
_PROCESSES = Processes(
    (sys.executable, "-m", "realizar.images.decode"), Made, "images", most_idle=4, answer_s=120.0
)  # a server looks at headers on three threads, and decodes on one


class RemoteImagesError(InvalidRequestError):
    """Images are at other servers, and were not fetched; the message refuses the first of `images`."""

    def __init__(self, message: str, param: str | None = None, images: Sequence[GivenImage] = ()) -> None:
        super().__init__(message, param)
        self.images = tuple(images)


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image's bytes, with their type of `MEDIA_TYPES`, and its size in pixels once it is rotated as EXIF says.

    `where` names it in errors. `low`: it is to be read with less detail.
    """

    where: str
    media_type: str
    data: bytes = field(repr=False)
    width: int
    height: int
    low: bool = False


@dataclass(frozen=True, slots=True)
class GivenImage:
    """An image as a request brings it, not looked at: its bytes, or text: a `data:` URI or base64, also in lines.

    `where` and `low` are those of `EncodedImage`. A `media_type` of `MEDIA_TYPES`, or of the URI, is that of its bytes,
    or it is refused.
    """

    where: str
    data: bytes = field(default=b"", repr=False)
    url: str | None = field(default=None, repr=False)
    base64: str | None = field(default=None, repr=False)
    media_type: str | None = None
    low: bool = False

    def open(self) -> EncodedImage:
        """Have its header looked at; no pixel is decoded.

        Raises InvalidRequestError, naming it, for what is no base64, for other URLs that were not `FETCHED`, for what
        is no image of a known format, and beyond the bounds; EngineUnavailableError as `Processes.ask`.
        """
        data, said = self._given()
        if len(data) > MAX_BYTES:
            raise InvalidRequestError(f"{self.where} has {len(data)} bytes; an image may have {MAX_BYTES}", self.where)
        made = _asked(self.where, Ask(memoryview(data), _LOOK_CPU_S))
        if said not in (None, made.media_type, made.media_type.replace("jpeg", "jpg")):  # as many call it
            known = ascii(said[:80])[1:-1]
            message = f"{self.where} is said to be {known}, and its bytes are {made.media_type}"
            raise InvalidRequestError(message, self.where)
        return EncodedImage(self.where, made.media_type, data, made.width, made.height, self.low)

    @property
    def is_remote(self) -> bool:
        """True if it is at an HTTP address, and was not fetched."""
        return (self.url or "")[:6].lower().startswith(("http:", "https:")) and self._fetched is None

    @property
    def _fetched(self) -> bytes | None:
        fetched = FETCHED.get()
        return None if fetched is None or self.url is None else fetched.get(self.url)

    def _given(self) -> tuple[bytes, str | None]:
        """Its bytes, and the media type that they are said to have."""
        if self._fetched is not None:
            return self._fetched, None
        if self.url is None:
            return self.data if self.base64 is None else self._decoded(self.base64), self.media_type
        scheme, _, rest = self.url.partition(":")
        if scheme.lower() != "data":
            raise InvalidRequestError(f"{self.where} must be a data URI; no URL is fetched", self.where)
        kind, found, text = rest.partition(",")
        if not found or not kind.lower().endswith(";base64"):
            raise InvalidRequestError(f"{self.where} must be of the form data:image/png;base64,...", self.where)
        return self._decoded(text), kind.partition(";")[0].lower() or None

    def _decoded(self, text: str) -> bytes:
        if len(text) > MAX_BYTES * 4 // 3 + 4:
            raise InvalidRequestError(f"{self.where} is too long; an image may have {MAX_BYTES} bytes", self.where)
        try:
            return binascii.a2b_base64(text.replace("\r", "").replace("\n", ""), strict_mode=True)
        except ValueError as error:
            raise InvalidRequestError(f"{self.where} is not valid base64: {error}", self.where) from None


def open_all(images: Sequence[GivenImage]) -> list[EncodedImage]:
    """Open the images of a request. Raises as `GivenImage.open`, and RemoteImagesError before any is looked at."""
    if remote := [each for each in images if each.is_remote]:
        where = remote[0].where
        raise RemoteImagesError(f"{where} must be a data URI; no URL is fetched", where, remote)
    return [each.open() for each in images]


def opening_once() -> Callable[[Sequence[GivenImage]], list[EncodedImage]]:
    """`open_all` for a request that is planned several times: each of its images is opened once. They have to live."""
    opened: dict[int, EncodedImage] = {}  # by the image's identity, as equality would compare its bytes

    def open_new(images: Sequence[GivenImage]) -> list[EncodedImage]:
        new = [each for each in images if id(each) not in opened]
        opened.update(zip(map(id, new), open_all(new), strict=True))
        return [opened[id(each)] for each in images]

    return open_new


def pictures_of(image: EncodedImage, cut: Cut) -> list[Pixels]:
    """Decode an image: its first frame in RGB, rotated as the EXIF before its pixels says, over white where it is
    transparent; and make pictures of it.

    InvalidRequestError, naming it: the file is cut short or malformed, or takes too long or too much memory.
    EngineUnavailableError as `Processes.ask`.
    """
    import numpy as np  # which the help of a command that takes images does not need

    made = _asked(image.where, Ask(memoryview(image.data), _DECODE_CPU_S, cut))
    size = cut.sizes[-1] if cut.tile is None else (cut.tile, cut.tile)
    sizes = [*[size] * (len(made.pictures) - 1), cut.whole or size]
    return [
        np.frombuffer(each, np.uint8).reshape(height, width, 3)
        for each, (width, height) in zip(made.pictures, sizes, strict=True)
    ]


def _asked(where: str, ask: Ask) -> Made:
    try:
        made = _PROCESSES.ask(ask)
    except WorkEndedError as error:
        fault = "takes too long to decode" if error.too_long else "ended the process that decoded it"
        raise InvalidRequestError(f"{where} {fault}", where) from None
    if made.error is not None:
        raise InvalidRequestError(f"{where} {made.error}", where)
    return made
