"""Bodies that are wrong in one place, or large: each is answered, or refused with a 400 that names the place."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any, cast

import httpx
import pytest

from realizar.server.app import create_app
from realizar.server.settings import ServerSettings
from server.ollama.test_ollama_answers import TEMPLATE, TOOLS
from server.ollama.test_open_webui import REQUESTS
from server.scripted_engine import ScriptedEngine, scripted_model
from server.wrong_bodies import changed, nested, paths_of

CHOICES = random.Random(13)
SETTINGS = next(each["body"] for each in REQUESTS if each["why"].startswith("a chat with every setting"))
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u", "images": []},
    {
        "role": "assistant",
        "content": "",
        "thinking": "t",
        "tool_calls": [{"id": "i", "type": "function", "index": 0, "function": {"name": "a", "arguments": {"x": 1}}}],
    },
    {"role": "tool", "content": "r", "tool_name": "a", "tool_call_id": "i"},
]
COMMON = {**SETTINGS, "model": "scripted", "stream": False, "format": "", "logprobs": True, "top_logprobs": 2}
COMMON |= {"template": "", "truncate": False, "shift": False}
WHOLE: dict[str, dict[str, Any]] = {
    "/api/chat": {**COMMON, "messages": MESSAGES, "tools": TOOLS},
    "/api/generate": {
        **{name: value for name, value in COMMON.items() if name != "messages"},
        "prompt": "p",
        "suffix": "",
        "system": "s",
        "context": [1, 2],
        "raw": False,
        "images": [],
    },
    "/api/embed": {"model": "scripted", "input": ["a", "b"], "truncate": True, "dimensions": 4, "options": {}},
    "/api/show": {"model": "scripted", "name": "scripted", "verbose": True, "template": "", "options": {}},
    "/api/pull": {"model": "scripted", "name": "x", "insecure": True, "stream": True},
}
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, -3, 1.5, 1e308, 10**400, "", "x", "x" * 9_000, "\0", "../../etc/passwd", [], {}, [[]], [{}]),
    *({"a": 1}, ["x"], nested(900), {"type": ["a"]}, [1] * 5_000),
)


def test_a_body_that_is_wrong_in_one_place_is_refused_by_name() -> None:
    app = create_app(cast("Any", ScriptedEngine()), scripted_model(TEMPLATE), ServerSettings(embeddings="last"))
    tried: dict[int, int] = {}

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            for route, body in WHOLE.items():
                assert (await client.post(route, json=body)).status_code == 200, route
                for path in paths_of(body):
                    for value in CHOICES.sample(VALUES, 2):
                        response = await client.post(route, json=changed(body, path, value))
                        tried[response.status_code] = tried.get(response.status_code, 0) + 1
                        if response.status_code != 200:
                            assert response.status_code in (400, 404), (path, value)
                            (message,) = response.json().values()
                            name = next(key for key in reversed(path) if isinstance(key, str))
                            assert name in message or "JSON body" in message, (path, value, message)

    asyncio.run(main())
    assert tried[200] > 30
    assert tried[400] > 150


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "scripted", "messages": [{"role": "user", "content": "x"}], **fields}).encode()


CALL = {"function": {"name": "a", "arguments": {}}}


@pytest.mark.parametrize(
    ("path", "body", "statuses"),
    [
        ("/api/chat", b'{"model":"scripted","messages":[' + b"{}," * 2_000_000 + b"{}]}", (400, 413)),
        ("/api/chat", b'{"model":"scripted","format":' + b"[" * 100_000 + b"]" * 100_000 + b"}", (400,)),
        ("/api/chat", b'{"model":"scripted","options":{"temperature":NaN}}', (400,)),
        ("/api/chat", chat(messages=[{"role": "user", "content": "x"}] * 9_000), (400,)),
        ("/api/chat", chat(messages=[{"role": "assistant", "tool_calls": [CALL] * 4_000}]), (200,)),
        ("/api/chat", chat(options={str(place): 1 for place in range(90_000)}), (400,)),
        ("/api/chat", chat(tools=TOOLS * 5_000), (400,)),
        ("/api/generate", b'{"model":"scripted","prompt":"x","context":[' + b"1," * 900_000 + b"1]}", (400,)),
        ("/api/generate", b'{"model":"scripted","prompt":"' + b"x" * 7_000_000 + b'"}', (400,)),
        ("/api/embed", json.dumps({"model": "scripted", "input": ["x"] * 90_000}).encode(), (400,)),
        ("/api/embed", b'{"model":"scripted","input":"' + b"x" * 7_000_000 + b'"}', (200,)),
        ("/api/show", b'{"model":"' + b"../" * 2_000_000 + b'"}', (404,)),
        ("/api/pull", b'{"model":"' + b"../" * 2_000_000 + b'"}', (400,)),
    ],
    ids=lambda value: value.rpartition("/")[2] if isinstance(value, str) else "",
)
def test_large_bodies_are_answered_or_refused(path: str, body: bytes, statuses: tuple[int, ...]) -> None:
    app = create_app(cast("Any", ScriptedEngine()), scripted_model(TEMPLATE), ServerSettings(embeddings="last"))

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post(path, content=body, headers={"content-type": "application/json"})

    response = asyncio.run(main())
    assert response.status_code in statuses, response.text[:200]
    assert len(response.content) < 5_000
