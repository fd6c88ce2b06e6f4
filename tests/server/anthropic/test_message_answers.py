"""Answers of the Messages API: blocks, stop reasons, counts and events, streamed and whole, with a scripted engine."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any, cast

import httpx
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, MessageTokensCount

from realizar.errors import EngineDeadError, InvalidRequestError, QueueFullError
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
TOOLS = [{"name": name, "input_schema": {"type": "object", "properties": {}}} for name in ("a", "b")]
CALLS = (
    '<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>'
)
BODY = {"model": "scripted", "max_tokens": 99, "messages": [{"role": "user", "content": "Hi"}]}


def post(engine: ScriptedEngine, body: Any, path: str = "/v1/messages", template: str | None = TEMPLATE) -> Any:
    app = create_app(cast("Any", engine), scripted_model(template), ServerSettings(api_keys=("k",)))

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post(path, json=body, headers={"x-api-key": "k"})

    return asyncio.run(main())


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream; each has its name twice."""
    events = []
    for part in text.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def answer(engine: ScriptedEngine, **fields: Any) -> Message:
    """The answer, the same whole and as the official client puts a stream together."""
    response = post(engine, {**BODY, **fields})
    assert response.status_code == 200, response.text
    whole = Message.model_validate(response.json())
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    stream = post(engine, {**BODY, **fields, "stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    for event in events_of(stream.text):
        if event["type"] != "ping":
            snapshot = accumulate_event(event=cast("Any", event), current_snapshot=snapshot, json_bufs=buffers)
    streamed = Message.model_validate(snapshot.to_dict())
    for message in (whole, streamed):
        assert message.id.startswith("msg_")
    without = {"id": True, "content": {"__all__": {"id", "parsed_output"}}}
    first, second = (made.model_dump(exclude_none=True, exclude=without) for made in (whole, streamed))
    assert first == second
    return whole


def blocks(message: Message) -> list[Any]:
    return [
        getattr(block, "text", None) or getattr(block, "thinking", None) or (block.name, block.input)  # type: ignore[union-attr]
        for block in message.content
    ]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_text_and_calls_are_blocks(size: int) -> None:
    engine = ScriptedEngine(deltas=cut(f"Hm.</think>Let me see.\n{CALLS}", size))
    made = answer(engine, tools=TOOLS)
    assert [block.type for block in made.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert blocks(made) == ["Hm.", "Let me see.", ("a", {"x": 1}), ("b", {})]
    assert (made.stop_reason, made.stop_sequence) == ("tool_use", None)
    ids = [block.id for block in made.content if block.type == "tool_use"]
    assert len(set(ids)) == 2


CUTTINGS = random.Random(7)


@pytest.mark.parametrize("text", answers_with(CALLS))
@pytest.mark.parametrize("fields", [{}, {"thinking": {"type": "adaptive", "display": "omitted"}}])
def test_streamed_is_whole_under_every_cutting(text: str, fields: dict[str, Any]) -> None:
    whole = blocks(answer(ScriptedEngine(deltas=(text,)), tools=TOOLS, **fields))
    for deltas in cuttings(text, CUTTINGS):
        assert blocks(answer(ScriptedEngine(deltas=deltas), tools=TOOLS, **fields)) == whole


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ('{"x": 123456789012345678901234567890}', {"x": 123456789012345678901234567890}),
        ('{"x": "\\ud83d!"}', {"x": "?!"}),
        ('{"x": NaN}', {}),
        ('{"x": ' + "[" * 5_000 + "]" * 5_000 + "}", {}),
    ],
)
def test_arguments_that_a_model_may_write_are_json(arguments: str, wanted: dict[str, Any]) -> None:
    text = f'</think><tool_call>\n{{"name": "a", "arguments": {arguments}}}\n</tool_call>'
    response = post(ScriptedEngine(deltas=(text,)), {**BODY, "tools": TOOLS})
    assert response.status_code == 200, response.text
    assert response.json()["content"][0]["input"] == wanted


def test_reasoning_that_is_not_wanted_is_left_out() -> None:
    engine = ScriptedEngine(deltas=("Hm.</think>", "Yes."))
    assert blocks(answer(engine, thinking={"type": "enabled", "budget_tokens": 1024})) == ["Hm.", "Yes."]
    assert blocks(answer(engine, thinking={"type": "adaptive", "display": "omitted"})) == ["Yes."]
    assert blocks(answer(ScriptedEngine(deltas=("Yes.",)), thinking={"type": "disabled"})) == ["Yes."]


def test_the_order_of_events() -> None:
    response = post(ScriptedEngine(deltas=("Hm.", "</think>", "Ye", "s.")), {**BODY, "stream": True})
    kinds = [
        (event["type"], event.get("index"), event.get("delta", {}).get("type")) for event in events_of(response.text)
    ]
    thinking, text = "thinking_delta", "text_delta"
    assert list(dict.fromkeys(kinds)) == [  # deltas that come together are one
        ("message_start", None, None),
        ("content_block_start", 0, None),
        ("content_block_delta", 0, thinking),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_delta", 1, text),
        ("content_block_stop", 1, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]


@pytest.mark.parametrize(("cached", "created"), [(0, 112), (48, 64), (112, 0)])
def test_the_counts_add_up_to_the_prompt(cached: int, created: int) -> None:
    engine = ScriptedEngine(deltas=("</think>", "a", "b"), num_cached=cached)
    prompt = "x" * (112 + 5 - len("user:|<think>"))
    plain = answer(engine, messages=[{"role": "user", "content": prompt}]).usage
    assert (plain.cache_read_input_tokens, plain.cache_creation_input_tokens) == (cached, 0)
    assert plain.input_tokens == 117 - cached
    block = {"type": "text", "text": prompt * 2}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "7" * 150, **MARK}]}
    for marked in (
        {"cache_control": MARK["cache_control"]},
        {"system": [{"type": "text", "text": "s", **MARK}]},
        {"tools": [{**TOOLS[0], **MARK}]},
        {"messages": [{"role": "user", "content": [{**block, **MARK}]}]},
        {"messages": [{"role": "user", "content": [result]}]},
    ):
        counted = answer(engine, **{"messages": [{"role": "user", "content": [block]}], **marked}).usage
        assert counted.cache_read_input_tokens == cached
        assert counted.cache_creation_input_tokens > 0
        assert counted.input_tokens < 16  # those of no whole block
    usage = answer(engine, messages=[{"role": "user", "content": prompt}], cache_control={"type": "ephemeral"}).usage
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens, usage.input_tokens) == (
        cached,
        created,
        5,
    )
    assert usage.output_tokens == 3
    count = post(engine, {"model": "scripted", "messages": [{"role": "user", "content": prompt}]}, COUNT)
    assert MessageTokensCount.model_validate(count.json()).input_tokens == 117


COUNT = "/v1/messages/count_tokens"
MARK = {"cache_control": {"type": "ephemeral"}}


def test_a_conversation_reaches_the_template() -> None:
    engine = ScriptedEngine()
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Go", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "zz"},
                {"type": "text", "text": "On it"},
                {"type": "tool_use", "id": "t1", "name": "a", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "7"}]},
                {"type": "text", "text": "So?"},
            ],
        },
        {"role": "user", "content": "Well?"},
    ]
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "Be brief."}]
    response = post(engine, {**BODY, "messages": messages, "system": system, "tools": TOOLS})
    assert response.status_code == 200, response.text
    text = bytes(engine.asked[0][0]).decode()
    shown = text[text.index("system:") :]
    call = '[{"id": "t1", "type": "function", "function": {"name": "a", "arguments": {"x": 1}}}]'
    assert shown == f"system:Be brief.|user:Go|assistant:On it[Hm]{call}|tool:7|user:So?\nWell?|<think>"
    changed = [{"type": "text", "text": "x-anthropic-billing-header: cch=2;"}, system[1]]
    post(engine, {**BODY, "messages": messages, "system": changed, "tools": TOOLS})
    joined = "x-anthropic-billing-header: cch=3;\n\nBe brief."  # as proxies join the blocks
    post(engine, {**BODY, "messages": messages, "system": joined, "tools": TOOLS})
    assert engine.asked[0][0] == engine.asked[1][0] == engine.asked[2][0]


def test_thousands_of_blocks_are_one_message() -> None:
    """Their texts are joined once: one after the other, 20,000 of 300 characters took 24 s."""
    engine = ScriptedEngine()
    texts = [f"{place:03}" for place in range(20_000)]
    messages = [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]
    assert post(engine, {**BODY, "messages": messages}).status_code == 200
    assert bytes(engine.asked[0][0]).decode() == f"user:{chr(10).join(texts)}|<think>"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/messages", 405), ("GET", "/v1/messages/batches", 404), ("POST", "/v1/messages/", 404)],
)
def test_what_is_not_there_is_refused_in_the_same_form(method: str, path: str, status: int) -> None:
    app = create_app(cast("Any", ScriptedEngine()), scripted_model(TEMPLATE), ServerSettings())

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.request(method, path, json=BODY)

    response = asyncio.run(main())
    assert (response.status_code, response.json()["type"]) == (status, "error")


def test_sampling_and_choices_of_tools_reach_the_engine() -> None:
    engine = ScriptedEngine()
    fields = {"temperature": 0.25, "top_k": 5, "top_p": 0.5, "stop_sequences": ["x", "y"]}
    assert post(engine, {**BODY, **fields}).status_code == 200
    sampling = engine.asked[-1][1]
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.stop) == (0.25, 5, 0.5, ("x", "y"))
    assert sampling.max_tokens == 99
    for choice, forced in (("auto", False), ("any", True), ("tool", True), ("none", False)):
        wanted = {"type": choice, **({"name": "b"} if choice == "tool" else {})}
        assert post(engine, {**BODY, "tools": TOOLS, "tool_choice": wanted}).status_code == 200
        assert (engine.asked[-1][1].structured is not None) == forced, choice
        assert (b'"name": "a"' in bytes(engine.asked[-1][0])) == (choice != "none")
    schema = {"type": "json_schema", "schema": {"type": "object"}}
    assert post(engine, {**BODY, "output_config": {"format": schema}}).status_code == 200
    structured = engine.asked[-1][1].structured
    reasoning, kind, value = json.loads(structured.value)  # the prompt opens reasoning, which comes first
    assert (structured.kind, kind, json.loads(value)) == ("nested", "json_schema", {"type": "object"})
    assert "</think>" in reasoning


def test_more_tokens_than_the_context_has_end_at_its_end() -> None:
    engine = ScriptedEngine(deltas=("</think>", "a"))
    assert post(engine, {**BODY, "max_tokens": 200_000}).status_code == 200
    prompt, sampling, _ = engine.asked[-1]
    assert len(prompt) + sampling.max_tokens == 100_000


def user(block: dict[str, Any], times: int = 1) -> dict[str, Any]:
    return {"role": "user", "content": [block] * times}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "assistant", "content": ""}]}, "messages"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
        "messages",
    ),
    ({"messages": [{"role": "tool", "content": "I"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "txt": "x"}]}]}, "messages.0.content.0.txt"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages.0.content.0.type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id"),
    ({"system": [{"type": "image"}]}, "system.0.type"),
    ({"stop_sequences": ["a"] * 99}, "stop_sequences"),
    ({"temperature": -1}, "temperature"),
    ({"tools": [{"name": "a"}]}, "tools.0.input_schema"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools.1.name"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "c"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"speed": "fast"}, "speed"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits.0.type"),
    ({"context_management": {"edit": []}}, "context_management.edit"),
    ({"top_n": 3}, "top_n"),
    ({"system": [{"type": []}]}, "system.0.type"),
    ({"system": [None]}, "system[0]"),
    ({"messages": [user({"type": "tool_result", "tool_use_id": "t", "content": [{"type": {}}]})]}, "0.content.0.type"),
    ({"messages": [user({"type": "text", "text": "x", "cache_control": 5})]}, "messages.0.content.0.cache_control"),
    ({"messages": [user({"type": "tool_result", "tool_use_id": "t", "is_error": 1})]}, "messages.0.content.0.is_error"),
    ({"messages": [user({"type": "tool_result", "tool_use_id": "t"}, 5_000)]}, "messages has 5000"),
    ({"stop_sequences": ["x" * 300]}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"context_management": {"edits": {}}}, "context_management.edits"),
]


@pytest.mark.parametrize(("fields", "named"), REFUSED)
def test_faults_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    engine = ScriptedEngine()
    body = {name: value for name, value in {**BODY, **fields}.items() if value is not None}
    response = post(engine, body)
    assert response.status_code == 400, response.text
    error = response.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert named in error["error"]["message"]
    assert engine.num_asked == 0


@pytest.mark.parametrize(
    ("engine", "status", "kind"),
    [
        (ScriptedEngine(refusal=QueueFullError("full")), 429, "rate_limit_error"),
        (ScriptedEngine(state="loading"), 529, "overloaded_error"),
        (ScriptedEngine(refusal=KeyError("x")), 500, "api_error"),
    ],
)
def test_errors_of_the_server(engine: ScriptedEngine, status: int, kind: str) -> None:
    response = post(engine, BODY)
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    assert response.headers["request-id"].startswith("req-")


def test_errors_of_the_engine_keep_their_words() -> None:
    refusal = InvalidRequestError("structured output is not possible with this model", "structured")
    for fields, named in (
        ({"tools": TOOLS, "tool_choice": {"type": "any"}}, "tools"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
    ):
        error = post(ScriptedEngine(refusal=refusal), {**BODY, **fields}).json()["error"]
        assert error["message"] == f"{named}: {refusal}"


def test_an_error_in_mid_stream_is_an_event() -> None:
    response = post(ScriptedEngine(deltas=("a", EngineDeadError("gone"))), {**BODY, "stream": True})
    events = events_of(response.text)
    assert [events[0]["type"], events[-1]["type"]] == ["message_start", "error"]
    assert events[-1]["error"]["type"] == "overloaded_error"


def test_a_model_that_is_not_served() -> None:
    response = post(ScriptedEngine(), {**BODY, "model": "claude"})
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
