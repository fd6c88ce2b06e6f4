"""Files of images are decoded as they are meant, or refused by name, before pixels beyond the bounds are made.

What opens and decodes them may die of a file, which costs its sender alone.
"""

from __future__ import annotations

import base64
import io
import resource
import struct
import sys
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from images.vision_models import encoded
from realizar.errors import EngineUnavailableError, InvalidRequestError
from realizar.images import decode, given
from realizar.images.decode import Cut, Made
from realizar.images.given import GivenImage, Pixels, pictures_of
from realizar.ipc.apart import Processes
from waits import HANG_S

Image = pytest.importorskip("PIL.Image", reason="images are decoded by Pillow")
ImageOps = pytest.importorskip("PIL.ImageOps")

RED, BLUE = (255, 0, 0), (0, 0, 255)


def pixels_of(data: bytes) -> Pixels:
    image = GivenImage("image 3", data).open()
    (pixels,) = pictures_of(image, Cut(((image.width, image.height),)))
    return pixels


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
        opened = decode.look(rotated(kind))
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
        (png_of(70_000, 1_000), "70000 x 1000 pixels, more than the 67108864"),
        (png_of(65_536, 1), "65536 x 1 pixels; an edge of an image may have 65535"),
        (png_of(3_000, 3_000), "is malformed"),
        (PNG.replace(b"IDAT", b"IDAX", 1), "no image of a known format"),
        (SCANS[: SCANS.rindex(b"\xff\xda")] + SCANS[SCANS.rindex(b"\xff\xda") : -2] * 99, "too many scans, 104"),
        (bytes(given.MAX_BYTES + 1), "33554433 bytes; an image may have 33554432"),
    ],
)
def test_what_is_no_image_is_refused_by_name(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^image 3 .*{message}") as caught:
        pixels_of(data)
    assert caught.value.param == "image 3"


@pytest.mark.parametrize("kind", decode.FORMATS)
def test_bytes_are_of_the_type_that_is_said(kind: str) -> None:
    """By a URI too. A JPEG file of several pictures, which Pillow calls MPO, is one as well."""
    image, name = corner("RGB", RED), f"image/{kind.lower()}"
    files = [encoded(image, kind)]
    if kind == "JPEG":
        files.append(encoded(image, "MPO", save_all=True, append_images=[image]))
    for data in files:
        text = base64.b64encode(data).decode()
        for said in (name, name.replace("jpeg", "jpg"), name.upper(), f"{name};charset=x", ""):
            assert GivenImage("image 3", url=f"data:{said};base64,{text}").open().media_type == name
        assert GivenImage("image 3", data, media_type=name).open().width == 8
        for other in {*given.MEDIA_TYPES, "text/plain"} - {name}:
            for said in (GivenImage("a", data, media_type=other), GivenImage("a", url=f"data:{other};base64,{text}")):
                with pytest.raises(InvalidRequestError, match=f"a is said to be {other}, and its bytes are {name}"):
                    said.open()


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
    for image in (GivenImage("a", url=f"DATA:image/png;base64,{text}"), GivenImage("a", base64=lines)):
        opened = image.open()
        assert (opened.width, opened.height) == (64, 64)


NOISE = encoded(Image.effect_noise((1000, 1000), 90), "PNG")


def test_decoding_may_not_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as short:
        short.setattr(given, "_DECODE_CPU_S", 1e-3)
        with pytest.raises(InvalidRequestError, match=r"^image 3 takes too long to decode$"):
            pixels_of(NOISE)
    assert pixels_of(NOISE).shape == (1000, 1000, 3)


def test_looking_at_a_header_may_not_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """This one has 80,000 chunks before its pixels."""
    monkeypatch.setattr(given, "_LOOK_CPU_S", 1e-3)
    chunk = b"\0\0\0\0prVt" + struct.pack(">I", zlib.crc32(b"prVt"))
    with pytest.raises(InvalidRequestError, match=r"^image 3 takes too long to decode$"):
        GivenImage("image 3", PNG[:33] + chunk * 80_000 + PNG[33:]).open()


def process_that(does: str) -> Processes[Made]:
    """Where images are opened instead, once it is asked: `theirs` is its end of the socket."""
    code = f"import os, socket, sys; theirs = socket.socket(fileno=int(sys.argv[-1])); theirs.recv(1); {does}"
    return Processes((sys.executable, "-c", code), Made, "images", most_idle=1, answer_s=HANG_S)


@pytest.mark.parametrize(
    "does", ["theirs.recv(1); os.kill(os.getpid(), 11)", "theirs.recv(1); theirs.send(b'1234567')"]
)
def test_a_file_that_breaks_the_decoder_costs_its_sender_alone(monkeypatch: pytest.MonkeyPatch, does: str) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(given, "_PROCESSES", process_that(does))
        with pytest.raises(InvalidRequestError, match=r"^image 3 ended the process that decoded it$") as caught:
            pixels_of(PNG)
    assert caught.value.param == "image 3"
    assert pixels_of(PNG).shape == (64, 64, 3)


def test_where_no_process_starts_no_image_is_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    for command in (("/no/such/program",), (sys.executable, "-c", "")):
        monkeypatch.setattr(given, "_PROCESSES", Processes(command, Made, "images", most_idle=1, answer_s=HANG_S))
        with pytest.raises(EngineUnavailableError, match="images"):
            pixels_of(NOISE * 8)  # more than the socket holds, so that it is not asked before it ends


@pytest.mark.skipif(sys.platform != "linux", reason="no other system has this limit")
def test_memory_is_bounded() -> None:
    """A process goes on after a file that wants more."""
    pixels_of(PNG)
    process = given._PROCESSES._idle.queue[-1]._process
    most, _ = resource.prlimit(process.pid, resource.RLIMIT_DATA)
    assert most < 2 << 30
    resource.prlimit(process.pid, resource.RLIMIT_DATA, (100 << 20, most))
    with pytest.raises(InvalidRequestError, match=r"^image 3 takes more memory than an image may$"):
        pixels_of(encoded(Image.new("RGB", (8000, 4000)), "PNG", compress_level=1))
    assert pixels_of(PNG).shape == (64, 64, 3)
    assert given._PROCESSES._idle.queue[-1]._process is process
    process.kill()
