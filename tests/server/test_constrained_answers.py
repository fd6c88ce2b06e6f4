"""A schema of the answer beside tools and behind reasoning, in every dialect: the grammar that the engine gets, and
what becomes of answers that it allows."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from realizar.errors import InvalidRequestError
from realizar.sampling_params import StructuredOutput
from realizar.server.app import create_app
from realizar.server.settings import ServerSettings
from server.cut_answers import cut
from server.scripted_engine import ScriptedEngine, events_of, scripted_model
from tokenizer.parsers.grammar_walk import ByteVocabulary, allows

PLAIN = "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"
THINKING = (
    PLAIN
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TEXT = '{"city": "<tool_call>\\n", "n": 3}'
HI = [{"role": "user", "content": "Hi"}]
PARAMETERS = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "n": {"type": "integer", "maximum": 9}},
    "required": ["city", "n"],
    "additionalProperties": False,
}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}


@dataclass(frozen=True)
class Dialect:
    """A route. Attributes: choices: the fields that force a call, forbid calls, and allow one alone; thoughtless: that
    turn reasoning off."""

    path: str
    body: dict[str, Any]
    tools: dict[str, Any]
    format: dict[str, Any]
    forced: dict[str, Any] | None
    none: dict[str, Any] | None
    single: dict[str, Any] | None
    thoughtless: dict[str, Any]
    param: str


DIALECTS = {
    "chat": Dialect(
        "/v1/chat/completions",
        {"messages": HI},
        {"tools": [FUNCTION]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        {"tool_choice": "required"},
        {"tool_choice": "none"},
        {"parallel_tool_calls": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        "response_format",
    ),
    "responses": Dialect(
        "/v1/responses",
        {"input": "Hi"},
        {"tools": [{"type": "function", "name": "f", "parameters": PARAMETERS, "strict": False}]},
        {"text": {"format": {**FORMAT, "name": "a"}}},
        {"tool_choice": "required"},
        {"tool_choice": "none"},
        {"parallel_tool_calls": False},
        {"reasoning": {"effort": "none"}},
        "text.format",
    ),
    "messages": Dialect(
        "/v1/messages",
        {"messages": HI, "max_tokens": 500},
        {"tools": [{"name": "f", "input_schema": PARAMETERS}]},
        {"output_config": {"format": FORMAT}},
        {"tool_choice": {"type": "any"}},
        {"tool_choice": {"type": "none"}},
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"thinking": {"type": "disabled"}},
        "output_config.format",
    ),
    "ollama": Dialect(
        "/api/chat",
        {"messages": HI},
        {"tools": [FUNCTION]},
        {"format": SCHEMA},
        None,
        None,
        None,
        {"think": False},
        "format",
    ),
}


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    return DIALECTS[request.param]


@dataclass(frozen=True)
class Answer:
    """What a client has of an answer."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()


def ask(
    dialect: Dialect, deltas: list[str], *fields: dict[str, Any] | None, template: str = PLAIN, stream: bool = False
) -> tuple[Answer, StructuredOutput | None]:
    """The answer, and the grammar that the engine was given."""
    engine = ScriptedEngine(deltas=deltas)
    body = {"model": "scripted", **dialect.body, "stream": stream}
    for each in fields:
        body |= each or {}
    answer = post(engine, dialect, body, template)
    assert answer.status_code == 200, answer.text
    return READERS[dialect.path](answer.text, stream), engine.asked[-1][1].structured


def post(engine: ScriptedEngine, dialect: Dialect, body: dict[str, Any], template: str) -> httpx.Response:
    async def main() -> httpx.Response:
        app = create_app(engine, scripted_model(template), ServerSettings())  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post(dialect.path, json=body)

    return asyncio.run(main())


def _events(text: str) -> list[dict[str, Any]]:
    datas = (event.split("data: ")[-1] for event in events_of(text))
    return [json.loads(data) for data in datas if data != "[DONE]"]


def read_chat(text: str, stream: bool) -> Answer:
    if not stream:
        message = json.loads(text)["choices"][0]["message"]
        calls = [each["function"] for each in message.get("tool_calls") or ()]
        called = tuple((each["name"], each["arguments"]) for each in calls)
        return Answer(message["content"] or "", message.get("reasoning_content") or "", called)
    content, reasoning, calls = "", "", list[list[str]]()
    for event in _events(text):
        for choice in event["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                if call.get("id"):
                    calls.append([call["function"]["name"], ""])
                calls[-1][1] += call["function"].get("arguments") or ""
    return Answer(content, reasoning, tuple((name, arguments) for name, arguments in calls))


def read_responses(text: str, stream: bool) -> Answer:
    output = (_events(text)[-1]["response"] if stream else json.loads(text))["output"]
    content = "".join(part["text"] for item in output if item["type"] == "message" for part in item["content"])
    reasoning = "".join(part["text"] for item in output if item["type"] == "reasoning" for part in item["content"])
    calls = tuple((item["name"], item["arguments"]) for item in output if item["type"] == "function_call")
    return Answer(content, reasoning, calls)


def read_messages(text: str, stream: bool) -> Answer:
    if not stream:
        blocks = json.loads(text)["content"]
    else:
        blocks = []
        for event in _events(text):
            if event["type"] == "content_block_start":
                blocks.append({**event["content_block"], "json": ""})
            delta = event.get("delta", {})
            for name, key in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json")):
                if name in delta:
                    blocks[-1][key] += delta[name]
        for block in blocks:
            block["input"] = json.loads(block["json"] or "{}")
    content = "".join(block["text"] for block in blocks if block["type"] == "text")
    reasoning = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    calls = tuple((block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use")
    return Answer(content, reasoning, calls)


def read_ollama(text: str, stream: bool) -> Answer:
    messages = [json.loads(line)["message"] for line in text.splitlines()]
    calls = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    return Answer(
        "".join(message["content"] for message in messages),
        "".join(message.get("thinking") or "" for message in messages),
        tuple((call["name"], json.dumps(call["arguments"])) for call in calls),
    )


READERS = {
    "/v1/chat/completions": read_chat,
    "/v1/responses": read_responses,
    "/v1/messages": read_messages,
    "/api/chat": read_ollama,
}
CALLED = (("f", '{"x": 1}'),)
VOCABULARY = ByteVocabulary([])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("size", [1, 1000])
def test_tools_and_a_schema(dialect: Dialect, size: int, stream: bool) -> None:
    for text, wanted in (
        (TEXT, Answer(TEXT)),
        (CALL, Answer(calls=CALLED)),
        (f"{CALL}\n{CALL}", Answer(calls=CALLED * 2)),
    ):
        answer, grammar = ask(dialect, cut(text, size), dialect.tools, dialect.format, stream=stream)
        assert answer == wanted
        assert allows(grammar, VOCABULARY, text)
    for text in ("Hello", '{"city": "x", "n": 10}', CALL.replace("1", '"a"'), ""):
        assert not allows(grammar, VOCABULARY, text)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_reasoning_and_a_schema(dialect: Dialect, stream: bool) -> None:
    """The prompt opens reasoning: it comes first, with tools and without."""
    for tools in (None, dialect.tools):
        text = f"So {{.\n</think>\n\n{TEXT}"
        answer, grammar = ask(dialect, cut(text, 3), tools, dialect.format, template=THINKING, stream=stream)
        assert answer == Answer(TEXT, "So {.")
        assert allows(grammar, VOCABULARY, text)
        assert not allows(grammar, VOCABULARY, TEXT)
        assert not allows(grammar, VOCABULARY, "So.</think>\n\nHello")
        assert allows(grammar, VOCABULARY, f"So.</think>\n{CALL}") is bool(tools)


def test_reasoning_that_is_off_has_no_part(dialect: Dialect) -> None:
    answer, grammar = ask(dialect, cut(TEXT, 3), dialect.format, dialect.thoughtless, template=THINKING)
    assert answer == Answer(TEXT)
    assert grammar == StructuredOutput("json_schema", json.dumps(SCHEMA)), "rows of a schema share masks"
    _, grammar = ask(dialect, [TEXT], dialect.format, dialect.thoughtless, dialect.tools, template=THINKING)
    assert allows(grammar, VOCABULARY, TEXT)
    assert not allows(grammar, VOCABULARY, f"<think></think>{TEXT}")


@pytest.mark.parametrize("dialect", [each for each in DIALECTS if DIALECTS[each].forced], indirect=True)
def test_the_choice_of_tools(dialect: Dialect) -> None:
    answer, grammar = ask(dialect, [CALL], dialect.tools, dialect.format, dialect.forced)
    assert answer.calls == CALLED
    assert allows(grammar, VOCABULARY, CALL)
    assert not allows(grammar, VOCABULARY, TEXT), "a call is forced: the schema has no part"
    answer, grammar = ask(dialect, [TEXT], dialect.tools, dialect.format, dialect.none)
    assert answer == Answer(TEXT)
    assert grammar == StructuredOutput("json_schema", json.dumps(SCHEMA))
    _, grammar = ask(dialect, [CALL], dialect.tools, dialect.format, dialect.single)
    assert allows(grammar, VOCABULARY, CALL)
    assert allows(grammar, VOCABULARY, TEXT)
    assert not allows(grammar, VOCABULARY, f"{CALL}\n{CALL}")


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        ("the JSON schema can't be honoured: x", None),
        ("the JSON schema of the rule arguments_0 can't be honoured: x", "the parameters of the tool 'f' can't be"),
    ],
)
def test_errors_name_the_schema_at_fault(dialect: Dialect, reason: str, name: str | None) -> None:
    engine = ScriptedEngine(refusal=InvalidRequestError(reason, "structured"))
    body = {"model": "scripted", **dialect.body, **dialect.tools, **dialect.format, "stream": False}
    answer = post(engine, dialect, body, PLAIN)
    assert answer.status_code == 400
    assert (name or reason) in answer.text
    if dialect.path.startswith("/v1/chat") or dialect.path == "/v1/responses":
        assert answer.json()["error"]["param"] == ("tools" if name else dialect.param)
