"""The fuzzer itself: it sees what it is to see, and a seed says what is sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from random import Random

import httpx
import pytest

from fuzz import healthy
from fuzz.bodies import make_request
from fuzz.check_answers import answer_fault
from fuzz.hostile_connections import ATTACKS, statuses
from fuzz.report import Report

_ERROR = {"message": "no", "type": "invalid_request_error", "param": None, "code": None}
_EVENTS = "text/event-stream; charset=utf-8"


@pytest.mark.parametrize(
    ("status", "content_type", "body"),
    [
        (500, "application/json", json.dumps({"error": _ERROR})),
        (400, "text/plain", "bad request"),
        (400, "application/json", json.dumps({"error": {**_ERROR, "message": "a\nb"}})),
        (400, "application/json", json.dumps({"detail": "no"})),
        (200, "application/json", "{"),
        (200, _EVENTS, ""),
        (200, _EVENTS, 'data: {"choices": []}\n\n'),
        (200, _EVENTS, 'event: response.failed\ndata: {"type": "response.failed"}\n\n'),
        (200, _EVENTS, "data: " + json.dumps({"error": {**_ERROR, "type": "server_error"}}) + "\n\n"),
    ],
)
def test_a_wrong_answer_is_a_fault(status: int, content_type: str, body: str) -> None:
    assert answer_fault(status, content_type, body.encode()) is not None


@pytest.mark.parametrize(
    ("status", "content_type", "body"),
    [
        (200, "application/json", '{"choices": []}'),
        (429, "application/json", json.dumps({"error": _ERROR})),
        (200, _EVENTS, 'data: {"choices": []}\n\ndata: [DONE]\n\n'),
        (200, _EVENTS, "data: " + json.dumps({"error": _ERROR}) + "\n\n"),
        (200, _EVENTS, 'event: response.completed\ndata: {"type": "response.completed"}\n\n'),
    ],
)
def test_a_right_answer_is_none(status: int, content_type: str, body: str) -> None:
    assert answer_fault(status, content_type, body.encode()) is None


def test_a_seed_says_what_is_sent() -> None:
    sent = [make_request(Random(f"1/{index}"), 512) for index in range(300)]
    assert sent == [make_request(Random(f"1/{index}"), 512) for index in range(300)]
    assert len(set(sent)) > 250
    assert {path for path, _ in sent} >= {"/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/responses"}


@pytest.mark.parametrize("place", range(len(ATTACKS)))
def test_every_attack_ends(place: int) -> None:
    async def size() -> int:
        return sum([len(piece) async for piece in ATTACKS[place](Random(3), "key")])

    assert asyncio.run(size()) > 0


def test_statuses_of_a_connection() -> None:
    assert statuses(b"HTTP/1.1 200 OK\r\nx: HTTP/1.1 9\r\n\r\n{}HTTP/1.1 400 Bad\r\n\r\n") == [200, 400]
    assert statuses(b"HTTP/1.1 401 No\r\n\r\n\r\nHTTP/1.1 413 No\r\n\r\n") == [401, 413]


async def _compare(events: AsyncIterator[bytes] | bytes, status: int = 200) -> list[str]:
    report = Report()
    transport = httpx.MockTransport(lambda request: httpx.Response(status, content=events))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        await healthy.compare(client, "greedy", json.dumps({"0": "ab"}), report)
    return report.faults


def _event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


def test_a_healthy_stream_is_compared() -> None:
    end = b"data: [DONE]\n\n"
    assert asyncio.run(_compare(_event("a") + _event("b") + end)) == []
    assert asyncio.run(_compare(b'{"error": {}}', 429)) == []
    for wrong in (_event("a") + end, _event("ab"), _event("a") + b'data: {"error": {"message": "no"}}\n\n', b""):
        assert len(asyncio.run(_compare(wrong))) == 1
    assert len(asyncio.run(_compare(b'{"error": {}}', 503))) == 1
