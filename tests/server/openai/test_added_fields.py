"""Fields that clients add to chat requests unasked are taken, and the model is shown nothing of them."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import httpx
import pytest

from realizar.server.app import create_app
from realizar.server.settings import ServerSettings
from server.scripted_engine import ScriptedEngine, scripted_model

TEMPLATE = "{{ messages | tojson }}{{ tools | tojson if tools }}"
MARK = {"cache_control": {"type": "ephemeral"}}
PART = {"type": "text", "text": "Hi"}
CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASSISTANT: dict[str, Any] = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "7"}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
BODY: dict[str, Any] = {
    "messages": [{"role": "system", "content": [PART]}, {"role": "user", "content": "Hi"}, ASSISTANT, RESULT],
    "tools": [TOOL],
}
LITELLM = {"function_call": None, "provider_specific_fields": {"a": 1}, "thinking_blocks": [], "reasoning_items": []}
CALL_OF_HELPERS = {**CALL, "index": 0, "function": {**CALL["function"], "parsed_arguments": {}}}
CASES: dict[str, dict[str, Any]] = {
    "a mark in a part": {"messages": [{"role": "system", "content": [{**PART, **MARK}]}, *BODY["messages"][1:]]},
    "a mark in every message": {"messages": [{**each, **MARK} for each in BODY["messages"]]},
    "a mark that is null": {"messages": [{**each, "cache_control": None} for each in BODY["messages"]]},
    "a mark in a tool": {"tools": [{**TOOL, **MARK}]},
    "a mark in a function": {"tools": [{**TOOL, "function": {**FUNCTION, **MARK}}]},
    "a mark for all": MARK,
    "OpenAI's helpers": {
        "messages": [*BODY["messages"][:2], {**ASSISTANT, "parsed": {"x": 1}, "tool_calls": [CALL_OF_HELPERS]}, RESULT]
    },
    "litellm": {
        "messages": [
            *BODY["messages"][:2],
            {**ASSISTANT, **LITELLM, "tool_calls": [{**CALL, "provider_specific_fields": {}}]},
            RESULT,
        ]
    },
}


def ask(body: dict[str, Any]) -> tuple[httpx.Response, str]:
    """The answer, and the prompt."""
    engine = ScriptedEngine()
    app = create_app(cast("Any", engine), scripted_model(TEMPLATE), ServerSettings())

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post("/v1/chat/completions", json={"model": "scripted", **body})

    answer = asyncio.run(main())
    return answer, bytes(engine.asked[-1][0]).decode() if engine.asked else ""


@pytest.mark.parametrize("changed", CASES.values(), ids=CASES.keys())
def test_the_prompt_is_that_of_a_request_without_them(changed: dict[str, Any]) -> None:
    plain, wanted = ask(BODY)
    answer, prompt = ask({**BODY, **changed})
    assert (plain.status_code, answer.status_code) == (200, 200), answer.text
    assert prompt == wanted


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_reasoning_without_content_is_a_message(name: str, content: dict[str, Any]) -> None:
    said = {"role": "assistant", name: "Hm.", **content}
    answer, prompt = ask({"messages": [*BODY["messages"][:2], said, BODY["messages"][1]]})
    assert answer.status_code == 200, answer.text
    shown, _ = json.JSONDecoder().raw_decode(prompt)
    assert shown[2] == {"role": "assistant", "content": "", "reasoning_content": "Hm."}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "content": None}, "messages[1].content"),
        ({"role": "user", "content": "Hi", "cache_control": 5}, "messages[1].cache_control"),
        ({"role": "user", "content": [{**PART, "cache_control": "x"}]}, "messages[1].content[0].cache_control"),
        ({"role": "user", "content": "Hi", "parsed": None}, "messages[1].parsed"),
        ({"role": "assistant", "content": "Hi", "images": [{"x": 1}]}, "messages[1].images"),
    ],
)
def test_others_are_refused_by_name(message: dict[str, Any], param: str) -> None:
    answer, _ = ask({"messages": [{"role": "user", "content": "Hi"}, message]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
