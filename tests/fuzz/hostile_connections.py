"""Connections that break the rules of HTTP, or stretch them. Each writes what it will, and reads what comes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from random import Random

_READ_S = 20.0
_MOST_READ = 1 << 20

Attack = Callable[[Random, str], AsyncIterator[bytes]]


def _head(rng: Random, key: str, *lines: str, host: str = "127.0.0.1") -> bytes:
    """A request's head; one in two has a key."""
    keyed = [f"Authorization: Bearer {key}"] if rng.random() < 0.5 else []
    path = rng.choice(("/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/models", "/nothing"))
    all_lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/json", *keyed, *lines]
    return "\r\n".join(all_lines).encode("latin-1") + b"\r\n\r\n"


async def _trailers(rng: Random, key: str) -> AsyncIterator[bytes]:
    yield _head(rng, key, "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n"
    for number in range(rng.choice((1, 50, 20_000))):
        yield b"x-%d: %s\r\n" % (number, b"y" * rng.choice((1, 1000)))
    yield b"\r\n"


async def _headers(rng: Random, key: str) -> AsyncIterator[bytes]:
    many = [f"X-{number}: {'v' * rng.choice((1, 200))}" for number in range(rng.choice((90, 3000)))]
    yield _head(rng, key, *many, "Content-Length: 2") + b"{}"


async def _chunks(rng: Random, key: str) -> AsyncIterator[bytes]:
    yield _head(rng, key, "Transfer-Encoding: chunked")
    for _ in range(rng.choice((3, 2000))):
        yield rng.choice((b"1;" + b"e" * 500 + b"\r\na\r\n", b"1\r\n{\r\n", b"00000000000000001\r\n}\r\n"))
    yield rng.choice((b"0\r\n\r\n", b"-1\r\n", b"ffffffffffffffffff\r\n", b"zz\r\n", b""))


async def _lengths(rng: Random, key: str) -> AsyncIterator[bytes]:
    length = rng.choice(("-1", "99999999999999999999", "1e3", "17000000", "3, 4", "abc", "0x10"))
    extra = rng.choice(("", "Transfer-Encoding: chunked", "Content-Length: 5", "Transfer-Encoding: gzip, chunked"))
    yield _head(rng, key, f"Content-Length: {length}", *filter(None, [extra])) + b"{}" * rng.choice((1, 1000))


async def _hosts(rng: Random, key: str) -> AsyncIterator[bytes]:
    host = rng.choice(("evil.example", "", "127.0.0.1:99999", "localhost\x00", "[::1", "a" * 5000))
    second = rng.choice(("X-A: b", "Host: 127.0.0.1", "Host: evil.example", "Sec-Fetch-Site: cross-site"))
    yield _head(rng, key, second, "Content-Length: 2", host=host) + b"{}"


async def _types(rng: Random, key: str) -> AsyncIterator[bytes]:
    line = rng.choice(
        ("Content-Encoding: gzip", "Expect: 100-continue", "Content-Type: text/plain", "Origin: https://evil.example")
    )
    yield _head(rng, key, line, "Content-Length: 20") + b"\x1f\x8b" + b"x" * 18


async def _pipeline(rng: Random, key: str) -> AsyncIterator[bytes]:
    one = _head(rng, key, "Content-Length: 2") + b"{}"
    yield one * rng.choice((2, 300))


async def _slow(rng: Random, key: str) -> AsyncIterator[bytes]:
    data = _head(rng, key, "Content-Length: 1000") + b'{"prompt":'
    for place in range(0, len(data), 16):
        yield data[place : place + 16]
        await asyncio.sleep(0.02)


async def _large(rng: Random, key: str) -> AsyncIterator[bytes]:
    size = rng.choice((1 << 20, 5 << 20, 20 << 20))
    piece = rng.choice((b'"k%d":1,', b"[", b"a", b"1,"))
    yield _head(rng, key, f"Content-Length: {size}") + b"{"
    sent, place = 1, 0
    while sent < size:
        part = b"".join(piece % (place + each) if b"%" in piece else piece for each in range(8192))
        yield part[: size - sent]
        sent, place = sent + len(part), place + 8192


async def _noise(rng: Random, key: str) -> AsyncIterator[bytes]:
    yield rng.choice(
        (b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/0.9\r\n\r\n", b"\r\n" * 5000)
    )
    yield rng.randbytes(rng.choice((1, 100, 5000)))


ATTACKS: tuple[Attack, ...] = (
    *(_trailers, _headers, _chunks, _lengths, _hosts, _types, _pipeline, _slow, _large, _noise),
)


async def attack(rng: Random, port: int, key: str) -> list[int]:
    """Open a connection, write one attack, read until the server ends it or is silent; statuses that were answered."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return []
    try:
        return await _exchange(rng, rng.choice(ATTACKS)(rng, key), reader, writer)
    finally:
        writer.transport.abort()


async def _exchange(
    rng: Random, chunks: AsyncIterator[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> list[int]:
    leaves = rng.random() < 0.3
    answer = asyncio.create_task(_read(reader))
    try:
        async with asyncio.timeout(_READ_S):
            async for chunk in chunks:
                writer.write(chunk)
                await writer.drain()
                if leaves and rng.random() < 0.01:
                    return []
            if leaves:
                return []
            return statuses(await answer)
    except (OSError, TimeoutError):
        return statuses(await _stopped(answer))
    finally:
        answer.cancel()


async def _stopped(answer: asyncio.Task[bytes]) -> bytes:
    return answer.result() if answer.done() and not answer.cancelled() and answer.exception() is None else b""


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Read until the server is silent for a second or closes."""
    content = b""
    while len(content) < _MOST_READ:
        try:
            async with asyncio.timeout(1.0 if content else _READ_S):
                part = await reader.read(1 << 16)
        except (TimeoutError, OSError):
            break
        if not part:
            break
        content += part
    return content


def statuses(content: bytes) -> list[int]:
    """The status of each answer in what a connection gave."""
    return [int(found) for found in re.findall(rb"HTTP/1\.[01] (\d{3}) ", content)]
