"""Bodies over the limit: refused so that the client can read it, whatever it has written by then."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from starlette.requests import Request

from realizar.request import Client
from realizar.server.errors import ApiError
from realizar.server.http.body import read_body
from realizar.server.http.request_memory import RequestLease, RequestMemory
from realizar.server.settings import ServerSettings
from server.http.http_door import Door, at_the_door
from server_thread import RunningServer, exchange


def test_a_client_that_writes_first_reads_its_refusal(server: RunningServer) -> None:
    """A client that writes a whole body over the limit before it reads still gets the refusal."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    size = 12 << 20  # more than both sockets' buffers hold
    answer = exchange(server, head + b"content-length: %d\r\n\r\n" % size + b"x" * size)
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"request_too_large" in answer
    chunk = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
    answer = exchange(server, head + b"transfer-encoding: chunked\r\n\r\n" + 12 * chunk + b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    ("length", "expect", "body_timeout_s"),
    [
        pytest.param(17 << 20, b"", 3600.0, id="beyond what is discarded"),
        pytest.param(5 << 20, b"expect: 100-continue\r\n", 3600.0, id="a client that asks first"),
        pytest.param(5 << 20, b"", 0.5, id="a body that does not come"),
    ],
)
def test_bodies_over_the_limit_that_are_not_read(length: int, expect: bytes, body_timeout_s: float) -> None:
    """The server waits for the last body alone, and no longer than a body may take."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"

    async def main(door: Door) -> None:
        started_s = time.monotonic()
        answer = await door.exchange(head + expect + b"content-length: %d\r\n\r\n" % length)
        assert answer.startswith(b"HTTP/1.1 413")
        assert body_timeout_s == 3600 or time.monotonic() - started_s >= body_timeout_s

    at_the_door(main, ServerSettings(log_requests=False, max_body_bytes=4 << 20, body_timeout_s=body_timeout_s))


def test_a_body_without_end_is_read_to_a_bound() -> None:
    parts = 0

    async def receive() -> dict[str, Any]:
        nonlocal parts
        parts += 1
        return {"type": "http.request", "body": b"x" * 1000, "more_body": True}

    headers = [(b"content-type", b"application/json")]
    request = Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)
    with pytest.raises(ApiError) as refused:
        asyncio.run(
            read_body(request, ServerSettings(max_body_bytes=10_000), RequestLease(RequestMemory(1 << 20), Client("x")))
        )
    assert refused.value.status == 413
    assert parts == 41
