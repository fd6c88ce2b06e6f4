"""Custom tools of text: the model calls a function with one argument, and clients see the text."""

from __future__ import annotations

import json
import random
from typing import Any

import openai
import pytest

from realizar.server.responses.tools import arguments_of, text_of
from server.cut_answers import cuttings
from server.responses.test_response_answers import BODY, answer, items, names_of, post
from server.scripted_engine import ScriptedEngine
from server_thread import RunningServer

TOOLS = [
    {"type": "custom", "name": "shell", "description": "Runs a line.", "format": {"type": "text"}},
    {"type": "function", "name": "a", "parameters": {"type": "object"}},
]
INPUT = 'echo "hé 🙂" \\ \n\tls'


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


CALLS = f"Hm.</think>{call('shell', arguments_of(INPUT))}\n{call('a', '{}')}"


def test_streamed_is_whole_under_every_cutting() -> None:
    for deltas in cuttings(CALLS, random.Random(3)):
        made = answer(ScriptedEngine(deltas=deltas), tools=TOOLS)
        assert items(made) == ["Hm.", (None, "shell", INPUT), (None, "a", "{}")]
        assert [item.type for item in made.output] == ["reasoning", "custom_tool_call", "function_call"]


def test_the_order_of_events() -> None:
    response = post(ScriptedEngine(deltas=(CALLS,)), {**BODY, "stream": True, "tools": TOOLS})
    assert [name for name, index in names_of(response) if index == 1] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]


def test_calls_and_outputs_come_back() -> None:
    said = [
        {"role": "user", "content": "Go"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "shell", "input": INPUT},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "fine"},
    ]
    engine = ScriptedEngine(deltas=("</think>", "Done."))
    assert answer(engine, input=said, tools=TOOLS).output_text == "Done."
    prompt = bytes(engine.asked[0][0]).decode()
    assert json.dumps(INPUT, ensure_ascii=False) in prompt or json.dumps(INPUT) in prompt
    assert "|tool:fine|" in prompt


@pytest.mark.parametrize("text", ["", "plain", INPUT, '"}', "a:b", '{"input": 1}', "\u2028\x00"])
def test_texts_and_arguments(text: str) -> None:
    whole = arguments_of(text)
    assert text_of(whole) == text
    assert text_of(whole.replace('{"', '{ "', 1)) == text
    for size in range(len(whole)):
        assert text.startswith(text_of(whole[:size]).rstrip("?"))
    escaped = json.dumps({"input": text})
    for size in range(len(escaped)):
        assert text.startswith(text_of(escaped[:size]).rstrip("?"))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_model_is_made_to_call_one(client: openai.OpenAI, server: RunningServer, streamed: bool) -> None:
    fields: dict[str, Any] = {
        "model": server.model.name,
        "input": "List the files.",
        "tools": TOOLS[:1],
        "tool_choice": {"type": "custom", "name": "shell"},
        "max_output_tokens": 60,
        "temperature": 0,
    }
    made = list(client.responses.create(**fields, stream=True))[-1].response if streamed else None
    made = made or client.responses.create(**fields)
    (item,) = made.output
    assert item.type == "custom_tool_call"
    assert (item.name, isinstance(item.input, str)) == ("shell", True)
    assert made.status in ("completed", "incomplete")
