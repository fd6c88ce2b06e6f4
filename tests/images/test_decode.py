"""Files of images are decoded as they are meant, or refused by name, before pixels beyond the bounds are made."""

from __future__ import annotations

import base64
import io
import struct
import sys
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from realizar.errors import InvalidRequestError
from realizar.images import decode
from realizar.images.decode import GivenImage
from realizar.images.prepare import Pixels

Image = pytest.importorskip("PIL.Image", reason="images are decoded by Pillow")
ImageOps = pytest.importorskip("PIL.ImageOps")

RED, BLUE = (255, 0, 0), (0, 0, 255)


def encoded(image: Any, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels_of(data: bytes) -> Pixels:
    return np.asarray(decode.decode(GivenImage("image 3", data).open()))


def corner(mode: str, colour: Any, size: tuple[int, int] = (8, 4)) -> Any:
    """An image of one colour; the left half of its upper row is black."""
    image = Image.new(mode, size, colour)
    image.paste(0 if mode in ("L", "I;16", "P") else (0,) * len(image.getbands()), (0, 0, size[0] // 2, 1))
    return image


def palette() -> Any:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([9, 9, 9, *RED])
    return image


def animation(kind: str) -> bytes:
    frames = [Image.new("RGB", (6, 4), colour) for colour in (RED, BLUE)]
    return encoded(
        frames[0], kind, save_all=True, append_images=frames[1:], **({"lossless": True} if kind == "WEBP" else {})
    )


def rotated(kind: str = "PNG", value: int = 6, **options: Any) -> bytes:
    """To be rotated by a quarter, clockwise, or as the other values of EXIF say."""
    exif = Image.Exif()
    exif[0x0112] = value
    return encoded(corner("RGB", RED), kind, exif=exif, **options)


def deep(transparent: int | None = None) -> bytes:
    """A PNG file of 16 bits a pixel, whose shade is 40,000."""
    options = {} if transparent is None else {"transparency": transparent}
    return encoded(Image.fromarray(np.full((2, 3), 40_000, np.uint16)), "PNG", **options)


@pytest.mark.parametrize(
    ("make", "shape", "last"),
    [
        (lambda: encoded(corner("RGB", RED), "PNG"), (4, 8), RED),
        (lambda: encoded(corner("RGB", RED), "WEBP", lossless=True), (4, 8), RED),
        (lambda: encoded(Image.new("RGBA", (3, 2), (255, 0, 0, 0)), "PNG"), (2, 3), (255, 255, 255)),
        (lambda: encoded(Image.new("LA", (3, 2), (0, 128)), "PNG"), (2, 3), (127, 127, 127)),
        (lambda: encoded(palette(), "PNG"), (4, 4), RED),
        (lambda: encoded(palette(), "PNG", transparency=1), (4, 4), (255, 255, 255)),
        (lambda: encoded(Image.new("L", (3, 2), 70), "PNG"), (2, 3), (70, 70, 70)),
        (lambda: encoded(Image.new("1", (3, 2), 1), "PNG"), (2, 3), (255, 255, 255)),
        (deep, (2, 3), (40_000 >> 8,) * 3),
        (lambda: deep(40_000), (2, 3), (255, 255, 255)),
        (lambda: deep(7), (2, 3), (40_000 >> 8,) * 3),
        (lambda: animation("GIF"), (4, 6), RED),
        (lambda: animation("WEBP"), (4, 6), RED),
        (rotated, (8, 4), RED),
    ],
)  # fmt: skip
def test_first_frames_are_rotated_and_lie_on_white(
    make: Callable[[], bytes], shape: tuple[int, int], last: tuple[int, int, int]
) -> None:
    pixels = pixels_of(make())
    assert pixels.shape == (*shape, 3)
    assert tuple(pixels[-1, 0]) == last


@pytest.mark.parametrize("value", range(1, 9))
def test_images_turn_as_pillow_turns_them(value: int) -> None:
    data = rotated("WEBP", value, lossless=True)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert np.array_equal(pixels_of(data), np.asarray(expected))


def test_headers_are_read_without_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Pillow would look for EXIF behind the pixels."""
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", None)
    for kind in ("PNG", "JPEG", "WEBP"):
        opened = GivenImage("image 3", rotated(kind)).open()
        assert (opened.width, opened.height) == (4, 8)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg_of_every_kind(mode: str) -> None:
    image = Image.fromarray(np.full((40, 30, 3), 128, np.uint8)).convert(mode)
    assert np.abs(pixels_of(encoded(image, "JPEG")).astype(int) - 128).max() <= 2


def png_of(width: int, height: int) -> bytes:
    """The beginning of a PNG file that says it has so many pixels, and one row of them."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1 + 3 * min(width, 99))))


PNG = encoded(corner("RGB", RED, (64, 64)), "PNG")
SCANS = encoded(Image.new("L", (8000, 8000)), "JPEG", progressive=True)
JPEG = encoded(Image.effect_noise((64, 64), 90).convert("RGB"), "JPEG")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no image of a known format"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image of a known format"),
        (b"<!doctype html><title>404</title>", "no image of a known format"),
        (encoded(corner("RGB", RED), "BMP"), "no image of a known format"),
        (encoded(corner("RGB", RED), "TIFF"), "no image of a known format"),
        (PNG[:20], "is malformed|no image of a known format"),
        (PNG[: len(PNG) - 30], "is malformed"),
        (JPEG[: len(JPEG) // 2], "is malformed: image file is truncated"),
        (png_of(60_000, 60_000), "has more pixels than the 67108864"),
        (png_of(70_000, 1_000), "70000 x 1000 pixels, more pixels than the 67108864"),
        (png_of(65_536, 1), "65536 x 1 pixels; an edge of an image may have 65535"),
        (png_of(3_000, 3_000), "is malformed"),
        (PNG.replace(b"IDAT", b"IDAX", 1), "no image of a known format"),
        (SCANS[: SCANS.rindex(b"\xff\xda")] + SCANS[SCANS.rindex(b"\xff\xda") : -2] * 99, "too many scans, 104"),
        (bytes(decode.MAX_BYTES + 1), "33554433 bytes; an image may have 33554432"),
    ],
)
def test_what_is_no_image_is_refused_by_name(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^image 3 .*{message}") as caught:
        pixels_of(data)
    assert caught.value.param == "image 3"


@pytest.mark.parametrize("kind", decode.FORMATS)
def test_bytes_are_of_the_type_that_is_said(kind: str) -> None:
    """A JPEG file of several pictures, which Pillow calls MPO, is one too."""
    image, name = corner("RGB", RED), f"image/{kind.lower()}"
    files = [encoded(image, kind)]
    if kind == "JPEG":
        files.append(encoded(image, "MPO", save_all=True, append_images=[image]))
    for data in files:
        assert GivenImage("image 3", data, media_type=name).open().width == 8
        for other in {*decode.MEDIA_TYPES} - {name}:
            with pytest.raises(InvalidRequestError, match=f"image 3 is said to be {other}, and its bytes are {name}"):
                GivenImage("image 3", data, media_type=other).open()


def test_threads_that_look_at_headers_leave_warnings_as_they_were() -> None:
    before, interval_s = list(warnings.filters), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    with ThreadPoolExecutor(8) as pool:
        sizes = set(pool.map(lambda _: GivenImage("image", PNG).open().width, range(2000)))
    sys.setswitchinterval(interval_s)
    assert sizes == {64}
    assert list(warnings.filters) == before


def test_a_row_of_many_pixels_is_an_image() -> None:
    assert pixels_of(encoded(Image.new("RGB", (1, 60_000), RED), "PNG")).shape == (60_000, 1, 3)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.com/a.png", "must be a data URI; no URL is fetched"),
        ("http://169.254.169.254/latest", "no URL is fetched"),
        ("file:///etc/passwd", "no URL is fetched"),
        ("", "no URL is fetched"),
        ("data:image/png,abc", "must be of the form"),
        ("data:image/png;base64", "must be of the form"),
        ("data:image/png;base64,a*b=", "is not valid base64"),
        ("data:image/png;base64,", "no image of a known format"),
        ("data:text/html;base64,PGh0bWw+", "no image of a known format"),
    ],
)
def test_only_data_uris_are_read(url: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        GivenImage("image 3", url=url).open()
    text = base64.b64encode(PNG).decode()
    lines = base64.encodebytes(PNG).decode().replace("\n", "\r\n")
    for given in (GivenImage("a", url=f"DATA:image/jpeg;base64,{text}"), GivenImage("a", base64=lines)):
        assert (given.open().width, given.open().height) == (64, 64)
