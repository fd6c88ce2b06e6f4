"""Bodies that are wrong in one place: each is answered, or refused with a 400 that names the path."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any, cast

import httpx
import pytest

from realizar.server.app import create_app
from realizar.server.settings import ServerSettings
from server.responses.test_codex import TURNS
from server.responses.test_response_answers import PATH, TEMPLATE
from server.scripted_engine import ScriptedEngine, scripted_model
from server.wrong_bodies import changed, nested, paths_of

CHOICES = random.Random(11)
ITEMS = [
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "a"}], "encrypted_content": "x"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}]},
    {"type": "function_call", "call_id": "c", "name": "a", "arguments": "{}", "namespace": None},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
]
WHOLE: dict[str, Any] = {
    **TURNS[0],
    "stream": False,
    "input": [*TURNS[0]["input"], *ITEMS],
    "include": ["message.output_text.logprobs"],
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "reasoning": {"effort": "medium", "summary": "auto"},
    "metadata": {"a": "b"},
    "temperature": 0.5,
    "truncation": "disabled",
}
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, 1e308, 10**400, "", "x", "x" * 9_000, "\0", [], {}, [[]], [{}], {"a": 1}, ["x"]),
    *(nested(900), {"type": "function"}, {"type": ["a"]}, [1] * 5_000),
)


def test_a_body_that_is_wrong_in_one_place_is_refused_by_name() -> None:
    app = create_app(cast("Any", ScriptedEngine()), scripted_model(TEMPLATE), ServerSettings())
    tried: dict[int, int] = {}

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            for path in paths_of(WHOLE):
                for value in CHOICES.sample(VALUES, 2):
                    response = await client.post(PATH, json=changed(WHOLE, path, value))
                    tried[response.status_code] = tried.get(response.status_code, 0) + 1
                    if response.status_code != 200:
                        assert response.status_code == 400, (path, value, response.text)
                        error = response.json()["error"]
                        assert error["param"] or error["code"] == "invalid_json", (path, value, error)

    asyncio.run(main())
    assert tried[200] > 30
    assert tried[400] > 100


def call(name: str) -> dict[str, str]:
    return {"type": "function_call", "call_id": name, "name": "a", "arguments": "{}"}


@pytest.mark.parametrize(
    ("body", "statuses"),
    [
        (b'{"input":[' + b"{}," * 2_000_000 + b"{}]}", (400, 413)),
        (b'{"input":' + b"[" * 100_000 + b"]" * 100_000 + b"}", (400,)),
        (json.dumps({"input": [call(str(place)) for place in range(4_096)]}).encode(), (200,)),
        (json.dumps({"input": [{**call("c"), "arguments": '{"a":' * 9_000}]}).encode(), (200,)),
        (json.dumps({"input": [{"role": "user", "content": "x"}] * 9_000}).encode(), (400,)),
        (json.dumps({"input": "x", "metadata": {str(place): "" for place in range(90_000)}}).encode(), (400,)),
        (json.dumps({"input": "x", "previous_response_id": "r" * 1_000_000}).encode(), (400,)),
        (json.dumps({"input": "x", "include": ["x" * 1_000_000]}).encode(), (400,)),
    ],
    ids=["items", "depth", "calls", "arguments", "messages", "metadata", "previous", "include"],
)
def test_large_bodies_are_answered_or_refused(body: bytes, statuses: tuple[int, ...]) -> None:
    app = create_app(cast("Any", ScriptedEngine()), scripted_model(TEMPLATE), ServerSettings())

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post(PATH, content=body, headers={"content-type": "application/json"})

    response = asyncio.run(main())
    assert response.status_code in statuses, response.text[:200]
    assert len(response.content) < 5_000
