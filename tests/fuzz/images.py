"""Hostile images and addresses: bombs of each format, cut files, files of other types, odd ones that are whole."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from PIL import Image

from images.vision_models import encoded

RED, BLUE = (255, 0, 0), (0, 0, 255)
_PNG_START = b"\x89PNG\r\n\x1a\n"
_PNG_KINDS = {(8, 2): 3, (16, 2): 6, (8, 0): 1}  # bytes of a pixel by depth and colour type


class HostileImage(NamedTuple):
    """An address that a request gives for an image; `is_read` where it is one that the model has to see."""

    name: str
    url: str
    is_read: bool = False


def hostile_images(port: int) -> list[HostileImage]:
    """All of them; some addresses are those of the server itself, at a port."""
    files = [*_bombs(), *_long_headers(), *_cut_files(), *_other_types(), *_odd_files()]
    found = [HostileImage(name, _uri(kind, data), is_read) for name, kind, data, is_read in files]
    return found + [HostileImage(url[:60], url) for url in _addresses(port)]


_File = tuple[str, str, bytes, bool]
"""A name, the type that is said, the bytes, and whether the model has to see it."""


def _uri(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _plain(mode: str = "RGB", size: tuple[int, int] = (40, 30)) -> Any:
    return Image.effect_noise(size, 90).convert(mode)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png(width: int, height: int, depth: int, colours: int, rows: int | None = None, *, extra: bytes = b"") -> bytes:
    """A PNG file of zeros, with the rows that it says, or fewer, and more chunks before the pixels."""
    row = 1 + -(-width * depth // 8) if depth < 8 else 1 + width * _PNG_KINDS[depth, colours]
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0))
    pixels = zlib.compress(bytes(row * (height if rows is None else rows)))
    return _PNG_START + head + extra + _chunk(b"IDAT", pixels) + _chunk(b"IEND", b"")


def _webp(width: int, height: int) -> bytes:
    """A lossless WebP file of one colour: its pixels take no bits."""
    bits = [(0x2F, 8), (width - 1, 14), (height - 1, 14), (0, 4), (0, 3), *[(0b101 | 7 << 3, 11)] * 5]
    value, place = 0, 0
    for each, count in bits:
        value |= each << place
        place += count
    body = value.to_bytes(-(-place // 8), "little")
    body += b"\0" * (len(body) % 2)
    return b"RIFF" + struct.pack("<I", 12 + len(body)) + b"WEBPVP8L" + struct.pack("<I", len(body)) + body


def _resized(jpeg: bytes, width: int, height: int) -> bytes:
    """A baseline JPEG file whose header says another size."""
    place = jpeg.index(b"\xff\xc0") + 5
    return jpeg[:place] + struct.pack(">HH", height, width) + jpeg[place + 4 :]


def _animated(kind: str, **options: Any) -> bytes:
    frames = [Image.new("RGB", (60, 40), colour) for colour in (RED, BLUE)] * 20
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)


def _bombs() -> Iterator[_File]:
    jpeg, gif = encoded(_plain(), "JPEG"), encoded(_plain("P"), "GIF")
    text = zlib.compress(bytes(64 << 20))
    scans = encoded(Image.new("L", (900, 900)), "JPEG", progressive=True)
    last = scans.rindex(b"\xff\xda")
    yield "a PNG of 60,000 x 60,000", "png", _png(60_000, 60_000, 8, 2, rows=1), False
    yield "a PNG of 70,000 x 1,000", "png", _png(70_000, 1_000, 8, 2, rows=1), False
    yield "a PNG of 65,536 x 1", "png", _png(65_536, 1, 8, 2), False
    yield "a PNG of 8,192 x 8,192 in black and white", "png", _png(8_192, 8_192, 1, 0), True
    yield "a PNG with a text of 64 MiB", "png", _png(9, 9, 8, 2, extra=_chunk(b"zTXt", b"a\0\0" + text)), False
    yield "a PNG with a profile of 64 MiB", "png", _png(9, 9, 8, 2, extra=_chunk(b"iCCP", b"a\0\0" + text)), False
    yield "a JPEG of 65,535 x 65,535", "jpeg", _resized(jpeg, 65_535, 65_535), False
    yield "a JPEG that says 4,000 x 4,000", "jpeg", _resized(jpeg, 4_000, 4_000), True
    yield "a JPEG of 9,000 scans", "jpeg", scans[:last] + scans[last:-2] * 9_000 + scans[-2:], False
    yield "a GIF of 65,535 x 65,535", "gif", gif[:6] + b"\xff" * 4 + gif[10:], False
    yield "a GIF with a screen of 4,000 x 4,000", "gif", gif[:6] + struct.pack("<HH", 4_000, 4_000) + gif[10:], True
    yield "a WebP of 16,384 x 16,384", "webp", _webp(16_384, 16_384), False
    yield "a WebP of 8,192 x 8,192", "webp", _webp(8_192, 8_192), True


def _long_headers() -> Iterator[_File]:
    jpeg, gif = encoded(_plain(), "JPEG"), encoded(_plain("P"), "GIF")
    start = 13 + 3 * (2 << (gif[10] & 7))  # after the colours
    yield "a PNG of 60,000 chunks", "png", _png(9, 9, 8, 2, extra=_chunk(b"prVt", b"") * 60_000), True
    yield "a JPEG of 100,000 comments", "jpeg", jpeg[:2] + b"\xff\xfe\0\2" * 100_000 + jpeg[2:], True
    yield "a GIF of 100,000 comments", "gif", gif[:start] + b"\x21\xfe\1a\0" * 100_000 + gif[start:], True


def _cut_files() -> Iterator[_File]:
    for kind in ("png", "jpeg", "webp", "gif"):
        whole = encoded(_plain("RGB", (200, 200)), kind)
        yield f"half of a {kind}", kind, whole[: len(whole) // 2], False
        yield f"20 bytes of a {kind}", kind, whole[:20], False


def _other_types() -> Iterator[_File]:
    plain = _plain()
    yield "a PNG that is said to be a JPEG", "jpeg", encoded(plain, "PNG"), False
    yield "a JPEG that is said to be a WebP", "webp", encoded(plain, "JPEG"), False
    yield (
        "an SVG",
        "svg+xml",
        b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
        False,
    )
    yield "HTML", "png", b"<!doctype html><title>404</title>", False
    yield "a PDF", "png", b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n", False
    yield "a BMP", "png", encoded(plain, "BMP"), False
    yield "a TIFF", "png", encoded(plain, "TIFF"), False
    yield "PostScript", "png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", False
    yield "nothing", "png", b"", False


def _odd_files() -> Iterator[_File]:
    plain, palette, exif = _plain(), _plain("P"), Image.Exif()
    exif[0x0112] = 6
    wrong = b"Exif\0\0MM\0*" + b"\xff" * 60
    yield "CMYK", "jpeg", encoded(_plain("CMYK"), "JPEG"), True
    yield "16 bits of grey", "png", encoded(Image.new("I;16", (40, 30), 40_000), "PNG"), True
    yield "16 bits of each colour", "png", _png(40, 30, 16, 2), True
    yield "a palette", "png", encoded(palette, "PNG"), True
    yield "a transparent palette", "png", encoded(palette, "PNG", transparency=b"\0\x7f" * 128), True
    yield (
        "a palette without colours",
        "png",
        _png(9, 9, 8, 0).replace(b"\x08\x00\x00\x00\x00", b"\x08\x03\0\0\0"),
        False,
    )
    yield "one bit", "png", encoded(_plain("1"), "PNG"), True
    yield "grey and transparent", "png", encoded(_plain("LA"), "PNG"), True
    yield "an animated GIF", "gif", _animated("GIF"), True
    yield "an animated WebP", "webp", _animated("WEBP"), True
    yield "an animated PNG", "png", _animated("PNG"), True
    yield "a JPEG of several pictures", "jpeg", encoded(plain, "MPO", save_all=True, append_images=[plain]), True
    yield "rotated", "jpeg", encoded(plain, "JPEG", exif=exif), True
    yield "with wrong EXIF", "jpeg", encoded(plain, "JPEG", exif=wrong), True
    yield "1 x 60,000", "png", encoded(Image.new("RGB", (1, 60_000), RED), "PNG"), True
    yield "1 x 1", "gif", encoded(Image.new("RGB", (1, 1), RED), "GIF"), True


def _addresses(port: int) -> Iterator[str]:
    yield f"http://127.0.0.1:{port}/health"
    yield f"http://localhost:{port}/health"
    yield f"http://[::ffff:127.0.0.1]:{port}/health"
    yield f"http://2130706433:{port}/health"
    yield "http://localhost/a.png"
    yield "http://169.254.169.254/latest/meta-data/iam/security-credentials/"
    yield "https://example.com@127.0.0.1/a.png"
    yield "file:///etc/passwd"
    yield "ftp://example.com/a.png"
    yield "data:image/png,abc"
    yield "data:image/png;base64,a*b="
    yield "data:text/html;base64," + base64.b64encode(encoded(_plain(), "PNG")).decode()
