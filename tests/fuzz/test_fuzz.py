"""The fuzzer itself: it sees what it is to see, and a seed says what is sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from random import Random

import httpx
import pytest

from fuzz import healthy
from fuzz.bodies import RECORDS, make_request
from fuzz.check_answers import answer_fault
from fuzz.hostile_connections import ATTACKS, statuses
from fuzz.report import Report

_ERROR = {"message": "no", "type": "invalid_request_error", "param": None, "code": None}
_EVENTS, _LINES = "text/event-stream; charset=utf-8", "application/x-ndjson"
_CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "status", "content_type", "body"),
    [
        (_CHAT, 500, "application/json", json.dumps({"error": _ERROR})),
        (_CHAT, 400, "text/plain", "bad request"),
        (_CHAT, 400, "application/json", json.dumps({"error": {**_ERROR, "message": "a\nb"}})),
        (_CHAT, 400, "application/json", json.dumps({"detail": "no"})),
        (_CHAT, 400, "application/json", json.dumps({"error": "no"})),
        ("/api/chat", 400, "application/json", json.dumps({"error": _ERROR})),
        ("/v1/messages", 400, "application/json", json.dumps({"error": "no"})),
        (_CHAT, 200, "application/json", "{"),
        (_CHAT, 200, _EVENTS, ""),
        (_CHAT, 200, _EVENTS, 'data: {"choices": []}\n\n'),
        (_CHAT, 200, _EVENTS, 'event: response.failed\ndata: {"type": "response.failed"}\n\n'),
        (_CHAT, 200, _EVENTS, "data: " + json.dumps({"error": {**_ERROR, "type": "server_error"}}) + "\n\n"),
        ("/v1/messages", 200, _EVENTS, 'event: error\ndata: {"type": "error", "error": {"type": "api_error"}}\n\n'),
        ("/api/chat", 200, _LINES, '{"done": false}\n'),
    ],
)
def test_a_wrong_answer_is_a_fault(path: str, status: int, content_type: str, body: str) -> None:
    assert answer_fault(path, status, content_type, body.encode()) is not None


@pytest.mark.parametrize(
    ("path", "status", "content_type", "body"),
    [
        (_CHAT, 200, "application/json", '{"choices": []}'),
        (_CHAT, 429, "application/json", json.dumps({"error": _ERROR})),
        ("/v1/messages", 529, "application/json", json.dumps({"type": "error", "error": _ERROR})),
        ("/api/chat", 404, "application/json", json.dumps({"error": "no"})),
        (_CHAT, 200, _EVENTS, 'data: {"choices": []}\n\ndata: [DONE]\n\n'),
        (_CHAT, 200, _EVENTS, "data: " + json.dumps({"error": _ERROR}) + "\n\n"),
        (_CHAT, 200, _EVENTS, 'event: response.completed\ndata: {"type": "response.completed"}\n\n'),
        ("/v1/messages", 200, _EVENTS, 'event: message_stop\ndata: {"type": "message_stop"}\n\n'),
        ("/api/chat", 200, _LINES, '{"done": false}\n{"done": true}\n'),
    ],
)
def test_a_right_answer_is_none(path: str, status: int, content_type: str, body: str) -> None:
    assert answer_fault(path, status, content_type, body.encode()) is None


def test_a_seed_says_what_is_sent() -> None:
    sent = [make_request(Random(f"1/{index}"), 512, ("a", "b")) for index in range(600)]
    assert sent == [make_request(Random(f"1/{index}"), 512, ("a", "b")) for index in range(600)]
    assert len(set(sent)) > 500
    assert {path for path, _ in sent} == set(RECORDS)
    assert {"/v1/messages", "/api/chat", "/v1/responses", "/v1/rerank", "/v1/score", "/api/embed"} <= set(RECORDS)


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
        await healthy.compare(client, "m", "greedy", json.dumps({"0": "ab"}), report)
    return report.faults


def _event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


def test_a_healthy_stream_is_compared() -> None:
    end = b"data: [DONE]\n\n"
    assert asyncio.run(_compare(_event("a") + _event("b") + end)) == []
    for wrong in (_event("a") + end, _event("ab"), _event("a") + b'data: {"error": {"message": "no"}}\n\n', b""):
        assert len(asyncio.run(_compare(wrong))) == 1
    for status in (429, 503):
        assert len(asyncio.run(_compare(b'{"error": {}}', status))) == 1
