"""`open_image` looks at a file's header, and `decode` makes pixels of it, within bounds. Pillow decodes.

Pillow is imported with the first image, numpy with the first one of 16 bits.
"""

from __future__ import annotations

import binascii
import io
import threading
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from realizar.errors import InvalidRequestError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MEDIA_TYPES = tuple(f"image/{name.lower()}" for name in FORMATS)
MAX_BYTES = 32 << 20
MAX_PIXELS = 64 << 20
MAX_EDGE = 65_535  # as of JPEG and GIF; Pillow's resizing takes 48 bytes for each pixel of an edge
_START_OF_SCAN = b"\xff\xda"
_MAX_SCANNED = 64 * MAX_PIXELS  # in all scans of a JPEG file, of which each may go over all pixels by a few bytes
_ORIENTATION = 0x0112  # the number of EXIF's tag, and what Pillow calls the turn that each value asks for
_TURNS = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
    8: "ROTATE_90",
}  # fmt: skip
_ROTATED = (5, 6, 7, 8)  # those that change width and height
_FILTERS = threading.Lock()  # of warnings, which all threads share


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image's bytes, with their type of `MEDIA_TYPES`, and its size in pixels once it is rotated as EXIF says.

    `where` names it in errors.
    """

    where: str
    media_type: str
    data: bytes = field(repr=False)
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class GivenImage:
    """An image as a request brings it, not looked at: its bytes, or text: a `data:` URI or base64, also in lines.

    `where` names it in errors. A `media_type` of `MEDIA_TYPES` is that of its bytes, or it is refused.
    """

    where: str
    data: bytes = field(default=b"", repr=False)
    url: str | None = field(default=None, repr=False)
    base64: str | None = field(default=None, repr=False)
    media_type: str | None = None

    def open(self) -> EncodedImage:
        """Read its header. InvalidRequestError as `open_image`, for what is no base64, and for other URLs: nothing is
        fetched.
        """
        text = self.base64
        if self.url is not None:
            scheme, _, rest = self.url.partition(":")
            if scheme.lower() != "data":
                raise InvalidRequestError(f"{self.where} must be a data URI; no URL is fetched", self.where)
            kind, found, text = rest.partition(",")
            if not found or not kind.lower().endswith(";base64"):
                raise InvalidRequestError(f"{self.where} must be of the form data:image/png;base64,...", self.where)
        image = open_image(self.data if text is None else self._decoded(text), self.where)
        if self.media_type not in (None, image.media_type):
            found = f"its bytes are {image.media_type}"
            raise InvalidRequestError(f"{self.where} is said to be {self.media_type}, and {found}", self.where)
        return image

    def _decoded(self, text: str) -> bytes:
        if len(text) > MAX_BYTES * 4 // 3 + 4:
            raise InvalidRequestError(f"{self.where} is too long; an image may have {MAX_BYTES} bytes", self.where)
        try:
            return binascii.a2b_base64(text.replace("\r", "").replace("\n", ""), strict_mode=True)
        except ValueError as error:
            raise InvalidRequestError(f"{self.where} is not valid base64: {error}", self.where) from None


def open_image(data: bytes, where: str) -> EncodedImage:
    """Read an image's header; no pixel is decoded.

    Raises InvalidRequestError, naming `where`, for what is no image of a known format, and beyond the bounds.
    """
    if len(data) > MAX_BYTES:
        raise InvalidRequestError(f"{where} has {len(data)} bytes; an image may have {MAX_BYTES}", where)
    with _opened(data, where) as image:
        is_jpeg = data.startswith(b"\xff\xd8")  # also where Pillow calls it MPO, as it has several pictures
        media_type = "image/jpeg" if is_jpeg else f"image/{image.format}".lower()
        width, height = image.size
        if width * height > MAX_PIXELS:
            size = f"{width} x {height} pixels"
            raise InvalidRequestError(
                f"{where} has {size}, more pixels than the {MAX_PIXELS} that an image may have", where
            )
        if max(width, height) > MAX_EDGE:
            size = f"{width} x {height} pixels"
            raise InvalidRequestError(f"{where} has {size}; an edge of an image may have {MAX_EDGE}", where)
        if is_jpeg and (scans := data.count(_START_OF_SCAN)) * width * height > _MAX_SCANNED:
            raise InvalidRequestError(f"{where} has too many scans, {scans}, for so many pixels", where)
        if _orientation(image) in _ROTATED:
            width, height = height, width
    return EncodedImage(where, media_type, data, width, height)


def decode(image: EncodedImage) -> Image:
    """Its first frame in RGB, rotated as the EXIF before its pixels says, over white where it is transparent.

    Raises InvalidRequestError, naming the image, where the file is cut short or malformed.
    """
    from PIL.Image import Transpose

    where = image.where
    with _opened(image.data, where) as opened:
        turn = _TURNS.get(_orientation(opened))
        try:
            opened.load()
            decoded = _on_white(opened)
        except Exception as error:  # noqa: BLE001 - decoders raise all kinds for malformed files
            raise _malformed(where, error) from None
    if turn is not None:
        decoded = decoded.transpose(Transpose[turn])
    if decoded.size != (image.width, image.height):
        raise InvalidRequestError(f"{where} is malformed: its header gives another size than its pixels have", where)
    return decoded


def _on_white(image: Image) -> Image:
    from PIL import Image

    if image.mode.startswith("I"):  # of 16 bits, which Pillow's own conversion clips at 255
        import numpy as np

        values = np.asarray(image)
        shades = np.where(values == image.info.get("transparency"), 255, values >> 8)
        return Image.fromarray(shades.astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        white.alpha_composite(image)
        image = white
    return image if image.mode == "RGB" else image.convert("RGB")


def _opened(data: bytes, where: str) -> Image:
    from PIL import Image, UnidentifiedImageError

    try:
        with _FILTERS, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of many pixels, which are counted here, and of odd metadata
            return Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise InvalidRequestError(
            f"{where} has more pixels than the {MAX_PIXELS} that an image may have", where
        ) from None
    except UnidentifiedImageError:
        known = ", ".join(FORMATS)
        raise InvalidRequestError(f"{where} is no image of a known format ({known})", where) from None
    except Exception as error:  # noqa: BLE001 - as above
        raise _malformed(where, error) from None


def _orientation(image: Image) -> int:
    from PIL.Image import Image

    try:  # not the getexif of PNG files, which decodes the pixels in search of EXIF behind them
        return int(Image.getexif(image).get(_ORIENTATION, 1))
    except Exception:  # noqa: BLE001 - malformed metadata turns nothing
        return 1


def _malformed(where: str, error: Exception) -> InvalidRequestError:
    reason = " ".join(f"{error}".split())[:200]
    return InvalidRequestError(f"{where} is malformed: {reason or type(error).__name__}", where)
