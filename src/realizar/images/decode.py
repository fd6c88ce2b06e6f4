"""The process that opens images and decodes them, by Pillow: `python -m realizar.images.decode SOCKET`.

No other process has Pillow look at a file. `given.py` is the other end.
"""

from __future__ import annotations

import io
import sys
import warnings
from typing import TYPE_CHECKING, Literal

import msgspec

from realizar.ipc.apart import answer_asks, processor_time

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS = 64 << 20
MAX_EDGE = 65_535  # as of JPEG and GIF; Pillow's resizing takes 48 bytes for each pixel of an edge
_MEMORY_BYTES = 1536 << 20
_START_OF_SCAN = b"\xff\xda"
_MAX_SCANNED = 64 * MAX_PIXELS  # in all scans of a JPEG file, of which each may go over all pixels by a few bytes
_ORIENTATION = 0x0112  # the number of EXIF's tag, and what Pillow calls the turn that each value asks for
_TURNS = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
    8: "ROTATE_90",
}  # fmt: skip
_ROTATED = (5, 6, 7, 8)  # those that change width and height


class Cut(msgspec.Struct, frozen=True):
    """How an image becomes pictures. It is resized to each of `sizes`, widths and heights, in turn, by a `filter`.

    With a `tile`, the edge of one in pixels, it is then cut into tiles, by row, and the last picture is the whole image
    in the size of one, unless it has that already; or the image as it was in the size `whole`, after whatever tiles.
    """

    sizes: tuple[tuple[int, int], ...]
    filter: Literal["bicubic", "bilinear", "lanczos"] = "bicubic"
    tile: int | None = None
    whole: tuple[int, int] | None = None


class Ask(msgspec.Struct, frozen=True):
    """Look at a file's header, and decode it and make pictures where there is a `cut`, in so much processor time."""

    data: memoryview
    cpu_s: float
    cut: Cut | None = None


class Made(msgspec.Struct, frozen=True):
    """The answer. `error`, where the file is refused, has the file as its subject.

    Width and height are those of `EncodedImage`; pictures have three bytes for each pixel, row by row.
    """

    media_type: str = ""
    width: int = 0
    height: int = 0
    pictures: tuple[memoryview, ...] = ()
    error: str | None = None


class ImageRefusedError(Exception):
    """A file is no image that is read here; the message has it as its subject."""


def look(data: bytes) -> Made:
    """What a file's header says; no pixel is decoded. ImageRefusedError: no image of a known format, or too large."""
    image = _opened(data)
    is_jpeg = data.startswith(b"\xff\xd8")  # also where Pillow calls it MPO, as it has several pictures
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise _too_many_pixels(f"{width} x {height} pixels, more")
    if max(width, height) > MAX_EDGE:
        raise ImageRefusedError(f"has {width} x {height} pixels; an edge of an image may have {MAX_EDGE}")
    if is_jpeg and (scans := data.count(_START_OF_SCAN)) * width * height > _MAX_SCANNED:
        raise ImageRefusedError(f"has too many scans, {scans}, for so many pixels")
    if _orientation(image) in _ROTATED:
        width, height = height, width
    return Made("image/jpeg" if is_jpeg else f"image/{image.format}".lower(), width, height)


def decode(data: bytes) -> Image:
    """A file's first frame in RGB, rotated as the EXIF before its pixels says, over white where it is transparent.

    Raises ImageRefusedError as `look`, and where the file is cut short or malformed; MemoryError.
    """
    from PIL.Image import Transpose

    said, opened = look(data), _opened(data)
    turn = _TURNS.get(_orientation(opened))
    try:
        opened.load()
        decoded = _on_white(opened)
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - decoders raise all kinds for malformed files
        raise _malformed(error) from None
    if turn is not None:
        decoded = decoded.transpose(Transpose[turn])
    if decoded.size != (said.width, said.height):
        raise ImageRefusedError("is malformed: its header gives another size than its pixels have")
    return decoded


def cut_up(image: Image, cut: Cut) -> list[Image]:
    """The pictures of an image in RGB."""
    from PIL.Image import Resampling

    tile, resampling = cut.tile, Resampling[cut.filter.upper()]
    given = image
    for size in cut.sizes:
        image = image.resize(size, resampling)
    if tile is None or (image.size == (tile, tile) and cut.whole is None):
        return [image]
    corners = ((left, top) for top in range(0, image.height, tile) for left in range(0, image.width, tile))
    tiles = [image.crop((left, top, left + tile, top + tile)) for left, top in corners]
    last = image.resize((tile, tile), resampling) if cut.whole is None else given.resize(cut.whole, resampling)
    return [*tiles, last]


def _on_white(image: Image) -> Image:
    from PIL import Image

    if image.mode.startswith("I"):  # of 16 bits, which Pillow's own conversion clips at 255
        shades = [value >> 8 for value in range(1 << 16)]
        if isinstance(transparent := image.info.get("transparency"), int):
            shades[transparent] = 255
        return image.convert("I").point(shades, "L").convert("RGB")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image if image.mode == "RGBA" else image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        white.alpha_composite(image)
        image = white
    return image if image.mode == "RGB" else image.convert("RGB")


def _opened(data: bytes) -> Image:
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise _too_many_pixels("more pixels") from None
    except UnidentifiedImageError:
        raise ImageRefusedError(f"is no image of a known format ({', '.join(FORMATS)})") from None
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        raise _malformed(error) from None


def _orientation(image: Image) -> int:
    from PIL.Image import Image

    try:  # not the getexif of PNG files, which decodes the pixels in search of EXIF behind them
        return int(Image.getexif(image).get(_ORIENTATION, 1))
    except Exception:  # noqa: BLE001 - malformed metadata turns nothing
        return 1


def _too_many_pixels(found: str) -> ImageRefusedError:
    return ImageRefusedError(f"has {found} than the {MAX_PIXELS} that an image may have")


def _malformed(error: Exception) -> ImageRefusedError:
    reason = " ".join(f"{error}".split())[:200]
    return ImageRefusedError(f"is malformed: {reason or type(error).__name__}")


def _answer(ask: Ask) -> Made:
    data = bytes(ask.data)
    with processor_time(ask.cpu_s):
        try:
            if ask.cut is None:
                return look(data)
            pictures = cut_up(decode(data), ask.cut)
            return Made(pictures=tuple(memoryview(each.tobytes()) for each in pictures))
        except ImageRefusedError as error:
            return Made(error=str(error))
        except MemoryError:
            return Made(error="takes more memory than an image may")


def _main() -> int:
    from PIL import GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin  # noqa: F401 - once for all files

    warnings.simplefilter("ignore")  # of many pixels, which are counted here, and of odd metadata
    return answer_asks(Ask, _answer, _MEMORY_BYTES)


if __name__ == "__main__":
    sys.exit(_main())
