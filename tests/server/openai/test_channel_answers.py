"""Answers in channels over HTTP: streamed and whole are equal."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from realizar.server.app import create_app
from realizar.server.settings import ServerSettings
from server.openai.test_answers import Answer, cut
from server.scripted_engine import ScriptedEngine, scripted_model

TEMPLATE = (
    "{{ tools }}{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "<|start|>assistant{# <|channel|> #}"
)
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}}]
TEXT = (
    "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"place": "Ulm"}'
)


def ask(engine: ScriptedEngine, **body: Any) -> httpx.Response:
    async def run() -> httpx.Response:
        app = create_app(engine, scripted_model(TEMPLATE), ServerSettings())  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            messages = [{"role": "user", "content": "Weather?"}]
            return await client.post("/v1/chat/completions", json={"messages": messages, **body})

    return asyncio.run(run())


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_streamed_and_whole(size: int) -> None:
    engine = ScriptedEngine(deltas=cut(TEXT, size))
    whole = Answer.of_whole(ask(engine, tools=TOOLS).json())
    assert (whole.reasoning, whole.content) == ("Look it up.", "I look.")
    assert whole.calls == [("get", '{"place": "Ulm"}')]
    assert whole.reason == "tool_calls"
    assert Answer.of_stream(ask(engine, tools=TOOLS, stream=True).text) == whole


def test_reasoning_that_a_template_cannot_turn_off() -> None:
    answer = ask(ScriptedEngine(), reasoning_effort="none")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "reasoning_effort"


def test_calls_without_marks_in_the_vocabulary() -> None:
    for param, fields in (
        ("tools", {"tools": TOOLS, "tool_choice": "required"}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("response_format", {"response_format": {"type": "json_object"}, "tools": TOOLS}),
    ):
        answer = ask(ScriptedEngine(), **fields)
        assert answer.status_code == 400
        assert "lacks the marks" in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == param
