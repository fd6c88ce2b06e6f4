"""Tool calls on a real model whose template shows no tools: forced by grammar, streamed, and left free."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

MODEL = "org/smollm2"
ASK = [{"role": "user", "content": "How is the weather in Rome?"}]


def tool(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters, **more}}


WEATHER = tool("weather", {"city": {"type": "string", "maxLength": 10}, "days": {"type": "integer", "maximum": 9}})
TIME = tool("time", {"zone": {"enum": ["UTC", "CET"]}})
NAMED = {"type": "function", "function": {"name": "time"}}


def call(client: openai.OpenAI, choice: Any, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 160, "tools": [WEATHER, TIME]}
        | {"tool_choice": choice, **fields}
    )


def check(name: str, arguments: str) -> None:
    parsed = json.loads(arguments)
    if name == "weather":
        assert set(parsed) == {"city", "days"}
        assert isinstance(parsed["days"], int)
    else:
        assert name == "time"
        assert parsed["zone"] in ("UTC", "CET")


def joined(chunks: list[Any]) -> list[dict[str, str]]:
    """The calls that a stream's deltas make up."""
    calls: list[dict[str, str]] = []
    for chunk in chunks:
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or ():
                if call.index == len(calls):
                    assert call.id
                    assert call.type == "function"
                    calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
                else:
                    assert call.id is None
                    assert call.function.name is None
                calls[call.index]["arguments"] += call.function.arguments
    return calls


ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}


@pytest.mark.parametrize("choice", ["required", NAMED, ALLOWED], ids=["required", "named", "allowed"])
def test_forced_calls(client: openai.OpenAI, choice: Any) -> None:
    fields = {"parallel_tool_calls": False}
    whole = call(client, choice, **fields)
    answer, answer_usage = whole.choices[0], whole.usage
    assert answer.finish_reason == "tool_calls"
    (made,) = answer.message.tool_calls
    check(made.function.name, made.function.arguments)
    assert answer.message.content is None
    if choice != "required":
        assert made.function.name == "time"
    chunks = list(call(client, choice, stream=True, stream_options={"include_usage": True}, **fields))
    usage = chunks.pop().usage  # of an answer that was ended when its one call was complete
    assert usage.prompt_tokens == answer_usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens >= 32
    assert [(each["name"], each["arguments"]) for each in joined(chunks)] == [
        (made.function.name, made.function.arguments)
    ]
    assert not any(choice.delta.content for chunk in chunks for choice in chunk.choices)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_forced_call_may_be_one_of_several(client: openai.OpenAI) -> None:
    calls = call(client, "required", max_tokens=100).choices[0].message.tool_calls
    assert calls
    for made in calls[:-1]:
        check(made.function.name, made.function.arguments)
    assert len({made.id for made in calls}) == len(calls)


@pytest.mark.parametrize("strict", [False, True])
def test_the_model_may_decide(client: openai.OpenAI, strict: bool) -> None:
    tools = [{**WEATHER, "function": {**WEATHER["function"], "strict": strict}}]
    answer = call(client, "auto", tools=tools, max_tokens=40).choices[0]
    assert answer.message.content or answer.message.tool_calls
    chunks = list(call(client, "auto", tools=tools, max_tokens=40, stream=True))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == (answer.message.content or "")
    assert len(joined(chunks)) == len(answer.message.tool_calls or ())


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "clock"}}])
@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"type": "object", "properties": {"at": {"type": "string", "pattern": "(?=a)b"}}}, "look-around"),
        ({"type": "object", "properties": {"at": {"$ref": "#/$defs/nothing"}}}, "nothing"),
    ],
)
def test_a_tool_that_cannot_be_enforced_is_named(
    client: openai.OpenAI, choice: Any, parameters: dict[str, Any], words: str
) -> None:
    clock = {"type": "function", "function": {"name": "clock", "strict": True, "parameters": parameters}}
    with pytest.raises(openai.BadRequestError, match="the parameters of the tool 'clock' can't be honoured") as caught:
        call(client, choice, tools=[WEATHER, clock])
    assert words in str(caught.value)
    assert caught.value.param == "tools"


@pytest.mark.parametrize("number", ["0", "9", "9" * 5000])
@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER]}], ids=["no tools", "hidden tools"])
def test_a_clients_own_grammar_is_named_by_its_rule(http: httpx.Client, number: str, fields: dict[str, Any]) -> None:
    """Also where the rule is called as one of a tool would be."""
    rule = f"arguments_{number}"
    grammar = f'start: {rule}\n{rule}: %json {{"type": "string", "pattern": "(?=a)b"}}\n'
    body = {"model": MODEL, "messages": ASK, "structured_outputs": {"grammar": grammar}, "max_tokens": 4}
    answer = http.post("/v1/chat/completions", json={**body, **fields, "tool_choice": "none"} if fields else body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert f"the JSON schema of the rule {rule[:64]} can't be honoured" in message
    assert "look-around" in message


def test_none_hides_the_tools(client: openai.OpenAI) -> None:
    without = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=12)
    hidden = call(client, "none", max_tokens=12)
    assert hidden.usage.prompt_tokens == without.usage.prompt_tokens
    assert hidden.choices[0].message.content == without.choices[0].message.content
    assert call(client, "auto", max_tokens=1).usage.prompt_tokens > without.usage.prompt_tokens + 50


def test_a_conversation_with_calls_goes_on(client: openai.OpenAI) -> None:
    made = call(client, NAMED).choices[0].message
    result = {"role": "tool", "tool_call_id": made.tool_calls[0].id, "content": "12:00"}
    answer = call(client, "auto", messages=[*ASK, made.model_dump(), result], max_tokens=20)
    assert answer.usage.prompt_tokens > 60


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/nothing"}}}, "nothing"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, ""),
        ({"type": "string", "pattern": "("}, ""),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "wish"}, "wish"),
        (False, ""),
    ],
)
def test_schemas_that_cannot_be_followed(client: openai.OpenAI, schema: Any, word: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    with pytest.raises(openai.BadRequestError) as caught:
        call(client, None, tools=None, response_format=form)
    assert caught.value.param == "response_format"
    assert word in caught.value.message


def test_schemas_that_recurse_or_repeat(client: openai.OpenAI) -> None:
    """Either followed or refused, soon; the server goes on."""
    recursing = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}}}}
    repeating = {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}
    looping = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    for schema in (recursing, repeating, looping):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        try:
            answer = call(client, None, tools=None, response_format=form, max_tokens=12)
        except openai.BadRequestError as error:
            assert error.param == "response_format"  # noqa: PT017
        else:
            assert answer.choices[0].message.content[0] in "{["
    wrong = ({"guided_regex": "(a{1,9999}){1,9999}"}, {"guided_regex": "["}, {"guided_grammar": "start: nothing"})
    for fields in wrong:
        with pytest.raises(openai.BadRequestError) as caught:
            call(client, None, tools=None, extra_body=fields)
        assert caught.value.param == next(iter(fields))
    assert call(client, None, tools=None, max_tokens=1).usage.completion_tokens == 1
