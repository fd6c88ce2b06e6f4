"""Fields that nothing knows are refused by name, or left out and logged once each."""

from __future__ import annotations

import asyncio
import copy
import logging
from typing import Any, cast

import httpx
import pytest

from realizar.server.app import create_app
from realizar.server.http.body import fitted
from realizar.server.http.unknown_fields import IgnoredFields
from realizar.server.openai.records import ChatCompletionRequest
from realizar.server.settings import ServerSettings
from server.scripted_engine import PLAIN_TEMPLATE, ScriptedEngine, scripted_model

TEMPLATE = PLAIN_TEMPLATE + "{% for m in messages %}{{ m.colour }}{% endfor %}"
HI = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "colour": 1}}}
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "top": ("/v1/chat/completions", {"messages": [HI], "colour": 1}, "colour"),
    "record in a record": (
        "/v1/chat/completions",
        {"messages": [HI], "stream": True, "stream_options": {"colour": 1}},
        "stream_options.colour",
    ),
    "message": ("/v1/chat/completions", {"messages": [HI, {**HI, "colour": "red"}]}, "messages[1].colour"),
    "part": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "colour": 1}]}]},
        "messages[0].content[0].colour",
    ),
    "function": (
        "/v1/chat/completions",
        {"messages": [HI], "tools": [{"type": "function", "function": {**cast("Any", TOOL["function"]), "colour": 1}}]},
        "tools[0].function.colour",
    ),
    "completion": ("/v1/completions", {"prompt": "hi", "colour": 1}, "colour"),
    "embedding": ("/v1/embeddings", {"input": "hi", "colour": 1}, "colour"),
    "tokens": ("/tokenize", {"prompt": "hi", "colour": 1}, "colour"),
    "block": (
        "/v1/messages",
        {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "colour": 1}]}]},
        "messages.0.content.0.colour",
    ),
    "tool of Anthropic's": (
        "/v1/messages",
        {"max_tokens": 5, "messages": [HI], "tools": [{"name": "look", "input_schema": {}, "colour": 1}]},
        "tools.0.colour",
    ),
    "option of Ollama's": (
        "/api/chat",
        {"stream": False, "messages": [HI], "options": {"colour": 1}},
        "options.colour",
    ),
    "call of Ollama's": (
        "/api/chat",
        {
            "stream": False,
            "messages": [
                {**HI, "role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": {}}, "colour": 1}]}
            ],
        },
        "messages[0].tool_calls[0].colour",
    ),
    "function of Ollama's": (
        "/api/chat",
        {"stream": False, "messages": [HI], "tools": [{"function": {"name": "a", "colour": 1}}]},
        "tools[0].function.colour",
    ),
    "model of Ollama's": ("/api/show", {"colour": 1}, "colour"),
    "embedding of Ollama's": ("/api/embed", {"input": "hi", "colour": 1}, "colour"),
}


def answers(ignore: bool, *requests: tuple[str, dict[str, Any]]) -> list[httpx.Response]:
    settings = ServerSettings(ignore_unknown_fields=ignore, embeddings="last")
    app = create_app(cast("Any", ScriptedEngine()), scripted_model(TEMPLATE), settings)

    async def main() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return [await client.post(path, json={"model": "scripted", **body}) for path, body in requests]

    return asyncio.run(main())


@pytest.mark.parametrize(("path", "body", "field"), CASES.values(), ids=CASES.keys())
def test_refused_by_name(path: str, body: dict[str, Any], field: str) -> None:
    (answer,) = answers(False, (path, body))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert field in (error if path.startswith("/api/") else error["message"])


@pytest.mark.parametrize(("path", "body", "field"), CASES.values(), ids=CASES.keys())
def test_left_out_and_logged_once(
    path: str, body: dict[str, Any], field: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "realizar.server.http.unknown_fields"):
        first, second = answers(True, (path, body), (path, body))
    assert (first.status_code, second.status_code) == (200, 200)
    assert "red" not in first.text
    (logged,) = [each.getMessage() for each in caplog.records if "unknown field" in each.getMessage()]
    assert "colour" in logged


def test_what_is_known_and_wrong_is_still_refused() -> None:
    (answer,) = answers(True, ("/v1/chat/completions", {"messages": [HI], "colour": 1, "temperature": "hot"}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
@pytest.mark.parametrize("name", ["thread", "conversation", "previous_response_id", "previous_message_id"])
def test_what_says_that_the_server_has_the_rest_is_never_left_out(path: str, name: str) -> None:
    body = {"messages": [HI], "max_tokens": 5} if path != "/api/chat" else {"messages": [HI], "stream": False}
    refused, empty = answers(True, (path, {**body, name: {"type": "continue"}}), (path, {**body, name: None}))
    assert (refused.status_code, empty.status_code) == (400, 200)
    assert name in refused.text


def test_schemas_keep_their_own_fields() -> None:
    """A tool's parameters are data: names in them are nobody's fields."""
    body = {"messages": [HI], "tools": [{**TOOL, "colour": 1}]}
    pruned = fitted(copy.deepcopy(body), ChatCompletionRequest, IgnoredFields())
    assert pruned == {"messages": [HI], "tools": [TOOL]}


def test_invented_names_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    many = {f"colour{number}": 1 for number in range(3000)}
    with caplog.at_level(logging.WARNING, "realizar.server.http.unknown_fields"):
        (answer,) = answers(True, ("/v1/completions", {"prompt": "hi", **many}))
    assert answer.status_code == 200
    assert len([each for each in caplog.records if "unknown field" in each.getMessage()]) == 1000
