"""Answers of the Responses API: items, counts and events, streamed and whole, with a scripted engine."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any, cast

import httpx
import openai
import pytest
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from realizar.errors import EngineDeadError, QueueFullError
from realizar.outputs import TokenLogprobs
from realizar.server.app import create_app
from realizar.server.settings import ServerSettings
from server.cut_answers import answers_with, cut, cuttings
from server.scripted_engine import ScriptedEngine, scripted_model

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}|{% endfor %}"
    "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
)
TOOLS = [
    {"type": "function", "name": "a", "parameters": {"type": "object", "properties": {}}},
    {"type": "namespace", "name": "team", "description": "d", "tools": [{"type": "function", "name": "b"}]},
]
CALLS = (
    '<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "team__b", "arguments": {}}\n</tool_call>'
)
BODY = {"model": "scripted", "input": "Hi"}
PATH = "/v1/responses"
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def post(engine: ScriptedEngine, body: Any, template: str | None = TEMPLATE, path: str = PATH) -> httpx.Response:
    app = create_app(cast("Any", engine), scripted_model(template), ServerSettings(api_keys=("k",)))

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post(path, json=body, headers={"authorization": "Bearer k"})

    return asyncio.run(main())


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream; each has its name twice, and its number."""
    events = []
    for place, part in enumerate(text.removesuffix("\n\n").split("\n\n")):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        assert events[-1]["sequence_number"] == place
        EVENT.validate_python(events[-1], strict=True)
    return events


def answer(engine: ScriptedEngine, **fields: Any) -> Response:
    """The answer, the same whole and as the official client puts a stream together."""
    response = post(engine, {**BODY, **fields})
    assert response.status_code == 200, response.text
    whole = Response.model_validate(response.json(), strict=True)
    stream = post(engine, {**BODY, **fields, "stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    state = ResponseStreamState[Any](input_tools=[], text_format=openai.omit)
    deltas: dict[int, str] = {}
    for event in events_of(stream.text):
        parsed = EVENT.validate_python(event)
        state.handle_event(parsed)
        if parsed.type.endswith(".delta"):
            deltas[parsed.output_index] = deltas.get(parsed.output_index, "") + parsed.delta  # type: ignore[union-attr,operator]
    streamed = EVENT.validate_python(event).response  # type: ignore[union-attr]
    assert plain(whole) == plain(streamed)
    assert deltas == {place: text for place, item in enumerate(whole.output) if (text := text_of(item))}
    for made in (whole, streamed):
        assert made.id.startswith("resp_")
        assert [item.id.partition("_")[0] for item in made.output] == [  # type: ignore[union-attr]
            {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}[item.type]
            for item in made.output
        ]
    return whole


def plain(response: Response) -> dict[str, Any]:
    return response.model_dump(exclude={"id", "created_at", "completed_at", "output"}) | {
        "output": [item.model_dump(exclude={"id", "call_id"}) for item in response.output]
    }


def text_of(item: Any) -> str:
    if item.type == "function_call":
        return cast("str", item.arguments)
    if item.type == "custom_tool_call":
        return cast("str", item.input)
    parts = item.content or item.summary
    return "".join(part.text for part in parts)


def items(response: Response) -> list[Any]:
    return [
        (item.namespace, item.name, text_of(item)) if item.type.endswith("_call") else text_of(item)
        for item in response.output
    ]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_text_and_calls_are_items(size: int) -> None:
    engine = ScriptedEngine(deltas=cut(f"Hm.</think>Let me see.\n{CALLS}", size))
    made = answer(engine, tools=TOOLS)
    assert [item.type for item in made.output] == ["reasoning", "message", "function_call", "function_call"]
    assert items(made) == ["Hm.", "Let me see.", (None, "a", '{"x": 1}'), ("team", "b", "{}")]
    assert made.status == "completed"
    assert len({item.call_id for item in made.output if item.type == "function_call"}) == 2
    assert made.output_text == "Let me see."


CUTTINGS = random.Random(7)


@pytest.mark.parametrize("text", answers_with(CALLS))
@pytest.mark.parametrize("fields", [{}, {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}])
def test_streamed_is_whole_under_every_cutting(text: str, fields: dict[str, Any]) -> None:
    whole = items(answer(ScriptedEngine(deltas=(text,)), tools=TOOLS, **fields))
    for deltas in cuttings(text, CUTTINGS):
        assert items(answer(ScriptedEngine(deltas=deltas), tools=TOOLS, **fields)) == whole
    assert whole  # an answer of nothing is an empty message


def names_of(response: httpx.Response) -> list[tuple[str, Any]]:
    return [(event["type"].removeprefix("response."), event.get("output_index")) for event in events_of(response.text)]


def test_the_order_of_events() -> None:
    text = f"Hm.</think>Yes.\n{CALLS}"
    response = post(ScriptedEngine(deltas=(text,)), {**BODY, "stream": True, "tools": TOOLS})
    assert list(dict.fromkeys(names_of(response))) == [  # deltas that come together are one
        ("created", None),
        ("in_progress", None),
        ("output_item.added", 0),
        ("content_part.added", 0),
        ("reasoning_text.delta", 0),
        ("reasoning_text.done", 0),
        ("content_part.done", 0),
        ("output_item.done", 0),
        ("output_item.added", 1),
        ("content_part.added", 1),
        ("output_text.delta", 1),
        ("output_text.done", 1),
        ("content_part.done", 1),
        ("output_item.done", 1),
        *(
            (name, index)
            for index in (2, 3)
            for name in (
                "output_item.added",
                "function_call_arguments.delta",
                "function_call_arguments.done",
                "output_item.done",
            )
        ),
        ("completed", None),
    ]
    summary = post(ScriptedEngine(deltas=("Hm.",)), {**BODY, "stream": True, "reasoning": {"summary": "auto"}})
    assert names_of(summary)[2:-1] == [
        ("output_item.added", 0),
        ("reasoning_summary_part.added", 0),
        ("reasoning_summary_text.delta", 0),
        ("reasoning_summary_text.done", 0),
        ("reasoning_summary_part.done", 0),
        ("output_item.done", 0),
    ]


def test_an_error_within_the_stream_fails_the_response() -> None:
    engine = ScriptedEngine(deltas=("</think>", "Yes", EngineDeadError("gone")))
    events = events_of(post(engine, {**BODY, "stream": True}).text)
    assert events[-1]["type"] == "response.failed"
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert failed["output"][0]["content"][0]["text"] == "Yes"
    early = post(ScriptedEngine(refusal=QueueFullError("full", 3.0)), {**BODY, "stream": True})
    assert (early.status_code, early.json()["error"]["code"]) == (429, "rate_limit_exceeded")


@pytest.mark.parametrize(("cached", "created"), [(0, 112), (48, 64), (112, 0)])
def test_the_counts_of_the_prompt(cached: int, created: int) -> None:
    prompt = "x" * (112 + 5 - len("user:|<think>"))
    usage = answer(ScriptedEngine(deltas=("</think>", "a", "b"), num_cached=cached), input=prompt).usage
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (117, 3, 120)
    details = usage.input_tokens_details
    assert (details.cached_tokens, details.cache_write_tokens) == (cached, created)


def test_a_conversation_reaches_the_template() -> None:
    engine = ScriptedEngine()
    sealed = answer(ScriptedEngine(deltas=("Hm</think>On it",)), include=["reasoning.encrypted_content"]).output[0]
    given = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Go on."}]},
        {"role": "user", "content": "Where?"},
        {"role": "user", "content": [{"type": "input_text", "text": "Go"}, {"type": "input_text", "text": "!"}]},
        {**sealed.model_dump(exclude_none=True), "content": []},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "another server's"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "On it"}]},
        {"type": "function_call", "call_id": "c1", "name": "a", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "b", "namespace": "team", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "8"}]},
    ]
    response = post(engine, {**BODY, "instructions": "Be brief.", "input": given, "tools": TOOLS})
    assert response.status_code == 200, response.text
    text = bytes(engine.asked[0][0]).decode()
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "a", "arguments": {"x": 1}}},
        {"id": "c2", "type": "function", "function": {"name": "team__b", "arguments": {}}},
    ]
    assert text[text.index("system:") :] == (
        f"system:Be brief.\n\nGo on.|user:Where?\n\nGo\n!|assistant:On it[Hm]{json.dumps(calls)}|tool:7|tool:8|<think>"
    )
    assert '"name": "team__b"' in text


def test_sampling_and_choices_of_tools_reach_the_engine() -> None:
    engine = ScriptedEngine()
    fields = {"temperature": 0.25, "top_p": 0.5, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    response = post(engine, {**BODY, **fields, "max_output_tokens": 99, "top_k": 7, "background": False}).json()
    sampling = engine.asked[-1][1]
    assert (sampling.max_tokens, sampling.top_k, response["max_output_tokens"]) == (99, 7, 99)
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert {name: response[name] for name in fields} == fields
    named = {"type": "function", "name": "b", "namespace": "team"}
    for choice, forced, shown in (
        ("auto", False, "ab"),
        ("none", False, ""),
        ("required", True, "ab"),
        (named, True, "ab"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [named]}, False, "b"),
        ({"type": "allowed_tools", "mode": "required", "tools": [named]}, True, "b"),
    ):
        made = post(engine, {**BODY, "tools": TOOLS, "tool_choice": choice})
        assert made.status_code == 200, made.text
        assert made.json()["tool_choice"] == choice
        assert (engine.asked[-1][1].structured is not None) == forced, choice
        prompt = bytes(engine.asked[-1][0])
        assert (b'"name": "a"' in prompt, b'"name": "team__b"' in prompt) == ("a" in shown, "b" in shown)
    for form, kind in (
        ({"type": "json_object"}, "json_object"),
        ({"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}, "json_schema"),
    ):
        made = post(engine, {**BODY, "text": {"format": form}})
        structured = engine.asked[-1][1].structured
        assert structured is not None
        reasoning, answers, _ = json.loads(structured.value)  # the prompt opens reasoning, which comes first
        assert (structured.kind, answers, made.json()["text"]["format"]) == ("nested", kind, form)
        assert "</think>" in reasoning


def test_logprobs_are_those_of_the_text() -> None:
    engine = ScriptedEngine(logprobs=TokenLogprobs(65, -0.5, 1, ((65, -0.5), (66, -1.0))), deltas=("A", "B"))
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "reasoning": {"effort": "none"}}
    part = answer(engine, **fields).output[0].content[0]  # type: ignore[union-attr,index]
    first = {"token": "A", "logprob": -0.5, "bytes": [65]}
    assert part.model_dump()["logprobs"] == [{**first, "top_logprobs": [first]}] * 2


def test_an_answer_that_is_cut_is_incomplete() -> None:
    app = post(ScriptedEngine(deltas=("</think>a",)), {**BODY, "max_output_tokens": 1})
    assert app.json()["status"] == "completed"  # the scripted engine stops by itself
