"""Answers have the official client's own types; streams have ids, a usage and an end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, cast

import httpx
import openai
import pytest

from realizar import __version__
from realizar.errors import EngineDeadError, QueueFullError
from realizar.server.app import create_app
from realizar.server.settings import ServerSettings
from server.scripted_engine import ScriptedEngine, events_of, scripted_model

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": ["Hi", "Ho"]},
}
CALL = '<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>'
TOOLS: Any = [{"type": "function", "function": {"name": "a", "parameters": {"type": "object", "properties": {}}}}]


def ask(path: str, body: Any = None, engine: ScriptedEngine | None = None) -> httpx.Response:
    app = create_app(cast("Any", engine or ScriptedEngine()), scripted_model(), ServerSettings(embeddings="last"))

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await (client.get(path) if body is None else client.post(path, json=body))

    return asyncio.run(main())


def strictly(engine: ScriptedEngine, work: Callable[[openai.AsyncOpenAI], Awaitable[None]]) -> None:
    """Work with the official client, which then refuses every answer that is not as its types have it."""
    template = "{{ messages[0].content }}<tool_call>{{ tools | tojson if tools }}<think>"
    app = create_app(cast("Any", engine), scripted_model(template), ServerSettings(embeddings="last"))

    async def main() -> None:
        transport = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")
        async with openai.AsyncOpenAI(
            base_url="http://server/v1",
            api_key="none",
            http_client=transport,
            max_retries=0,
            _strict_response_validation=True,
        ) as client:
            await work(client)

    asyncio.run(main())


def test_the_clients_own_types() -> None:
    async def work(client: openai.AsyncOpenAI) -> None:
        messages: Any = [{"role": "user", "content": "Hi"}]
        chat = client.chat.completions
        answer = await chat.create(model="scripted", messages=messages, tools=TOOLS, n=2)
        assert answer.choices[1].message.tool_calls
        assert answer.choices[1].finish_reason == "tool_calls"
        options: Any = {"include_usage": True}
        chunks = await chat.create(
            model="scripted", messages=messages, tools=TOOLS, n=2, stream=True, stream_options=options
        )
        listed = [chunk async for chunk in chunks]
        assert {chunk.object for chunk in listed} == {"chat.completion.chunk"}
        assert listed[-1].usage
        assert (await client.completions.create(model="scripted", prompt="Hi")).choices[0].finish_reason == "stop"
        assert (await client.embeddings.create(model="scripted", input="Hi", encoding_format="float")).data[0].embedding
        models = [model async for model in client.models.list()]
        assert models == [await client.models.retrieve("scripted")]

    strictly(ScriptedEngine(deltas=("Hm.</think>", "So: ", CALL)), work)


@pytest.mark.parametrize("path", BODIES)
def test_chunks_of_one_stream_are_of_one_answer(path: str) -> None:
    body = {**BODIES[path], "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    response = ask(path, body, ScriptedEngine(num_cached=1))
    for name, value in (("cache-control", "no-cache"), ("x-accel-buffering", "no")):
        assert response.headers[name] == value
    assert response.headers["content-type"].startswith("text/event-stream")
    *deltas, usage, done = events_of(response.text)
    assert done == "[DONE]"
    chunks = [json.loads(delta) for delta in (*deltas, usage)]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks[:-1])
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    num_choices = 2 * len(body.get("prompt", "x"))
    assert (reasons.count("stop"), len(set(reasons) - {None, "stop"})) == (num_choices, 0)
    assert chunks[-1]["choices"] == []
    del body["stream"], body["stream_options"]
    whole = ask(path, body, ScriptedEngine(num_cached=1)).json()
    assert chunks[-1]["usage"] == whole["usage"]
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": num_choices // 2}


@pytest.mark.parametrize("path", BODIES)
def test_no_usage_unless_asked_for(path: str) -> None:
    for options in (None, {"include_usage": False}, {"include_usage": None, "include_obfuscation": False}):
        events = [*events_of(ask(path, {**BODIES[path], "stream": True, "stream_options": options}).text)]
        assert not any("usage" in json.loads(event) for event in events[:-1])
        assert all(json.loads(event)["choices"] for event in events[:-1])


@pytest.mark.parametrize("path", BODIES)
def test_an_error_ends_a_stream_that_has_begun(path: str) -> None:
    engine = ScriptedEngine(deltas=("Hel", EngineDeadError("died")))
    body = {**BODIES[path], "stream": True}
    body["prompt"] = "Hi"
    if "messages" in body:
        del body["prompt"]
    *deltas, last = events_of(ask(path, body, engine).text)
    assert deltas
    error = json.loads(last)
    assert set(error) == {"error"}
    assert set(error["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_stream_that_is_refused_before_its_echo_has_a_status(logprobs: int | None) -> None:
    body = {"prompt": "Hi", "echo": True, "logprobs": logprobs, "stream": True}
    refused = ask("/v1/completions", body, ScriptedEngine(refusal=QueueFullError("full", 3.0)))
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")


@pytest.mark.parametrize("token_id", [-1, 256, 10**400])
def test_no_text_of_an_id_outside_the_vocabulary(token_id: int) -> None:
    refused = ask("/detokenize", {"tokens": [72, token_id]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")


def test_the_version() -> None:
    assert ask("/version").json() == {"version": __version__}
