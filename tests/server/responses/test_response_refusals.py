"""What the Responses API can't honour is refused by name and path, before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from server.responses.test_response_answers import BODY, TOOLS, post
from server.scripted_engine import ScriptedEngine

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "always"}, "truncation"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "custom"}]}, "tools[0].name"),
    ({"tools": [{"type": "custom", "name": "x", "parameters": {}}]}, "tools[0].parameters"),
    ({"tools": [{"type": "custom", "name": "x", "format": "text"}]}, "tools[0].format"),
    ({"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar"}}]}, "tools[0].format.type"),
    (
        {"tools": [{"type": "custom", "name": "x"}], "tool_choice": {"type": "function", "name": "x"}},
        "tool_choice.name",
    ),
    ({"input": [{"type": "custom_tool_call", "call_id": "x", "name": "a"}]}, "input[0].input"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "x y"}]}, "tools[0].name"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].type"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "zzz"}, "tools": TOOLS}, "tool_choice.name"),
    ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
    ({"include": ["nonsense"]}, "include[0]"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"reasoning": {"effort": "gigantic"}}, "reasoning.effort"),
    ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"metadata": {str(place): "" for place in range(17)}}, "metadata"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"nonsense": 1}, "nonsense"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [{}]}, "input[0].role"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": "x", "name": "y"}]}, "input[0].name"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 1}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": ["x"]}]}, "input[0].type"),
    ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "x", "name": "a", "arguments": {}}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call", "call_id": "x", "name": "a", "arguments": "{}"}] * 2}, "input[1].call_id"),
    ({"input": [{"type": "reasoning", "id": 7}]}, "input[0].id"),
    ({"input": [{"type": "reasoning", "summary": {}}]}, "input[0].summary"),
    ({"input": [{"role": "user", "content": "x"}] * 4097}, "input"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    engine = ScriptedEngine()
    response = post(engine, {**BODY, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    assert param.rpartition(".")[2].partition("[")[0] in error["message"]
    assert engine.num_asked == 0
