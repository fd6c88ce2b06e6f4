"""A peer of HTTP/1.0 knows no chunks, no interim answers, and no second request on its connection."""

from __future__ import annotations

import json

import pytest

from server.http.http_door import Door, at_the_door

ASK = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}]}
STREAMS = {
    "/v1/chat/completions": (b"data: {", b"data: [DONE]\n\n"),
    "/v1/messages": (b"event: message_start\n", b'"type":"message_stop"}\n\n'),
    "/api/chat": (b'{"model":"scripted"', b"}\n"),
}


def call(path: str, *, stream: bool, version: bytes = b"1.0", more: bytes = b"") -> bytes:
    bound = {} if path.startswith("/api") else {"max_tokens": 9}
    body = json.dumps({**ASK, **bound, "stream": stream}).encode()
    head = b"POST %b HTTP/%b\r\nhost: localhost\r\ncontent-type: application/json\r\n" % (path.encode(), version)
    return head + b"content-length: %d\r\n%b\r\n" % (len(body), more) + body


@pytest.mark.parametrize("more", [b"", b"connection: keep-alive\r\n", b"expect: 100-continue\r\n"])
@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_ends_with_its_connection(path: str, more: bytes) -> None:
    async def main(door: Door) -> None:
        head, _, body = (await door.exchange(call(path, stream=True, more=more))).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"transfer-encoding" not in head
        assert b"content-length" not in head
        assert b"\r\nconnection: close" in head
        begin, end = STREAMS[path]
        assert body.startswith(begin)
        assert body.endswith(end)

    at_the_door(main)


@pytest.mark.parametrize("path", STREAMS)
def test_a_whole_answer_has_its_length(path: str) -> None:
    async def main(door: Door) -> None:
        head, _, body = (await door.exchange(call(path, stream=False))).partition(b"\r\n\r\n")
        assert b"\r\ncontent-length: %d\r\n" % len(body) in head
        assert json.loads(body)

    at_the_door(main)


def test_newer_peers_get_chunks() -> None:
    async def main(door: Door) -> None:
        sent = call("/v1/chat/completions", stream=True, version=b"1.1", more=b"connection: close\r\n")
        head, _, body = (await door.exchange(sent)).partition(b"\r\n\r\n")
        assert b"\r\ntransfer-encoding: chunked" in head
        assert body.endswith(b"0\r\n\r\n")

    at_the_door(main)
