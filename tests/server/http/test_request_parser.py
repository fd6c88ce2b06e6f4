"""Requests with `Upgrade`, as Java's client sends them: they are answered as any others, with their bodies."""

from __future__ import annotations

import re

import pytest

from realizar.server.http.protocol import RequestParser
from server.http.http_door import Door, at_the_door

UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"
BODY = b'{"prompt": "abc"}'
HEAD = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
WITH_LENGTH = HEAD + UPGRADE + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = (
    HEAD + UPGRADE + b"transfer-encoding: chunked\r\n\r\n5\r\n%b\r\nc\r\n%b\r\n0\r\nx: y\r\n\r\n" % (BODY[:5], BODY[5:])
)
WITHOUT_BODY = b"GET /version HTTP/1.1\r\nhost: localhost\r\n" + UPGRADE + b"\r\n"
PLAIN = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
INNER = b"GET /inner HTTP/1.1\r\nhost: localhost\r\n\r\n"


class Events:
    """Notes requests. Attributes: requests: their targets and bodies; open: False between two of them."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.requests: list[tuple[bytes, bytes]] = []
        self.open = False

    def on_message_begin(self) -> None:
        assert not self.open
        self.open, self.url, self.body, self.headers = True, b"", b"", []

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self.open

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.requests.append((self.url, self.body))
        self.open = False


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_every_way_of_cutting_requests_gives_the_same(size: int) -> None:
    smuggled = HEAD + UPGRADE + b"content-length: %d\r\n\r\n" % len(INNER) + INNER
    sent = b"".join((PLAIN, WITH_LENGTH, WITHOUT_BODY, CHUNKED, smuggled, WITHOUT_BODY, PLAIN))
    events = Events()
    parser = RequestParser(events)
    for start in range(0, len(sent), size):
        parser.feed_data(sent[start : start + size])
    post, get = (b"/tokenize", BODY), (b"/version", b"")
    assert events.requests == [post, post, get, post, (b"/tokenize", INNER), get, post]


def test_they_are_answered_on_a_connection_that_goes_on() -> None:
    async def main(door: Door) -> None:
        requests = (WITH_LENGTH, CHUNKED, WITHOUT_BODY, PLAIN.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        answer = await door.exchange(b"".join(requests))
        assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200"] * 4
        assert answer.count(b'"tokens":') == 3

    at_the_door(main)


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"chunked, chunked", b"identity"])
def test_bodies_in_other_transfer_codings_are_refused(coding: bytes) -> None:
    """Read as plain chunks, a compressed body would be taken for another."""

    async def main(door: Door) -> None:
        sent = CHUNKED.replace(UPGRADE, b"").replace(b"chunked", coding)
        assert re.findall(rb"HTTP/1.1 (\d+)", await door.exchange(sent)) == [b"400"]
        plain = sent.replace(coding, b" Chunked ").replace(b"HTTP/1.1\r\n", b"HTTP/1.1\r\nconnection: close\r\n")
        assert re.findall(rb"HTTP/1.1 (\d+)", await door.exchange(plain)) == [b"200"]

    at_the_door(main)


@pytest.mark.parametrize("framing", [b"content-length: 5\r\ncontent-length: 6\r\n", b"transfer-encoding: x\r\n"])
def test_bodies_without_a_clear_end_are_refused(framing: bytes) -> None:
    async def main(door: Door) -> None:
        answer = await door.exchange(HEAD + UPGRADE + framing + b"\r\n" + INNER)
        assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"400"]

    at_the_door(main)
