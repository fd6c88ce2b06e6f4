"""Answers of Ollama's API with a scripted engine: lines, calls, reasoning and refusals, streamed and whole."""

from __future__ import annotations

import asyncio
import json
import random
from datetime import datetime
from typing import Any, cast

import httpx
import pytest

from realizar.errors import EngineDeadError, InvalidRequestError, QueueFullError
from realizar.server.app import create_app
from realizar.server.ollama.routes import OLLAMA
from realizar.server.settings import ServerSettings
from server.cut_answers import answers_with, cut, cuttings
from server.scripted_engine import ScriptedEngine, scripted_model

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{% if m.name %}({{ m.name }}){% endif %}"
    "{% if m.tool_call_id %}<{{ m.tool_call_id }}>{% endif %}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}|{% endfor %}"
    "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("a", "b")]
CALLS = (
    '<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>'
)
BODY: dict[str, Any] = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}]}


def post(engine: ScriptedEngine, body: Any, path: str = "/api/chat", template: str | None = TEMPLATE) -> httpx.Response:
    app = create_app(cast("Any", engine), scripted_model(template), ServerSettings())

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post(path, json=body)

    return asyncio.run(main())


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    return [json.loads(line) for line in response.text.splitlines()]


def joined(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream put together as clients do it."""
    whole: dict[str, Any] = {"role": "assistant", "content": ""}
    for line in lines:
        message = line["message"]
        assert set(message) <= {"role", "content", "thinking", "tool_calls"}
        whole["content"] += message["content"]
        if "thinking" in message:
            whole["thinking"] = whole.get("thinking", "") + message["thinking"]
        if "tool_calls" in message:
            whole["tool_calls"] = [*whole.get("tool_calls", []), *message["tool_calls"]]
    return whole


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls", [])]
    return {**message, "tool_calls": calls}


def answer(engine: ScriptedEngine, **fields: Any) -> dict[str, Any]:
    """The message of an answer, the same whole and streamed."""
    response = post(engine, {**BODY, **fields, "stream": False})
    assert response.status_code == 200, response.text
    whole = response.json()
    assert whole["done"] is True
    lines = lines_of(post(engine, {**BODY, **fields}))  # a stream is Ollama's default
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["message"] == {"role": "assistant", "content": ""}
    for line in (whole, *lines):
        assert datetime.fromisoformat(line["created_at"]).tzinfo is not None
    for name in ("done_reason", "prompt_eval_count", "eval_count", "model"):
        assert whole[name] == lines[-1][name]
    assert without_ids(joined(lines)) == without_ids(whole["message"])
    return cast("dict[str, Any]", whole["message"])


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_text_and_calls(size: int) -> None:
    message = answer(ScriptedEngine(deltas=cut(f"Hm.</think>Let me see.\n{CALLS}", size)), tools=TOOLS)
    assert (message["thinking"], message["content"]) == ("Hm.", "Let me see.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"index": 0, "name": "a", "arguments": {"x": 1}},
        {"index": 1, "name": "b", "arguments": {}},
    ]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


CUTTINGS = random.Random(11)


@pytest.mark.parametrize("text", answers_with(CALLS))
@pytest.mark.parametrize("fields", [{}, {"think": False}, {"think": True}])
def test_streamed_is_whole_under_every_cutting(text: str, fields: dict[str, Any]) -> None:
    whole = without_ids(answer(ScriptedEngine(deltas=(text,)), tools=TOOLS, **fields))
    for deltas in cuttings(text, CUTTINGS):
        assert without_ids(answer(ScriptedEngine(deltas=deltas), tools=TOOLS, **fields)) == whole


def test_thinking_that_is_not_wanted_is_left_out() -> None:
    assert "thinking" not in answer(ScriptedEngine(deltas=("Yes.",)), think=False)
    always = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
    body = {**BODY, "think": False, "stream": False}
    message = post(ScriptedEngine(deltas=("Hm.</think>", "Yes.")), body, template=always).json()["message"]
    assert message == {"role": "assistant", "content": "Yes."}


def test_a_conversation_reaches_the_template() -> None:
    engine = ScriptedEngine()
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Go", "images": []},
        {
            "role": "assistant",
            "thinking": "Hm",
            "tool_calls": [
                {"function": {"name": "a", "arguments": {"x": 1}}},
                {"id": "own", "type": "function", "index": 1, "function": {"name": "b", "arguments": {}}},
                {"function": {"name": "a", "arguments": {"x": 2}, "index": 2}},
            ],
        },
        {"role": "tool", "tool_name": "b", "content": "B"},
        {"role": "tool", "content": "first"},
        {"role": "tool", "tool_name": "a", "content": "second"},
        {"role": "tool", "tool_name": "c", "content": "of no call"},
    ]
    response = post(engine, {**BODY, "messages": messages, "think": False})
    assert response.status_code == 200, response.text
    shown = bytes(engine.asked[0][0]).decode().split("|")
    assert shown[:2] == ["system:Be brief.", "user:Go"]
    calls = json.loads(shown[2].removeprefix("assistant:[Hm]"))
    assert [(call["id"], call["function"]["arguments"]) for call in calls] == [
        ("call00001", {"x": 1}),
        ("own", {}),
        ("call00003", {"x": 2}),
    ]
    assert shown[3:] == [
        "tool:B(b)<own>",
        "tool:first(a)<call00001>",
        "tool:second(a)<call00003>",
        "tool:of no call(c)<call00004>",
        "",
    ]


def test_a_last_message_of_the_assistants_is_continued() -> None:
    engine = ScriptedEngine(deltas=(" done",))
    said = {"role": "assistant", "content": "It is"}
    for last, end in ((said, "assistant:It is"), ({**said, "content": ""}, "assistant:|<think>")):
        made = post(engine, {**BODY, "messages": [*BODY["messages"], last], "stream": False})
        assert made.status_code == 200, made.text
        assert bytes(engine.asked[-1][0]).decode() == f"user:Hi|{end}"
    asked = post(engine, {**BODY, "messages": [*BODY["messages"], said], "stream": False})
    assert asked.json()["message"] == {"role": "assistant", "content": " done"}


def test_options_reach_the_engine() -> None:
    engine = ScriptedEngine()
    options = {"temperature": 0.25, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.9, "repeat_penalty": 1.2}
    options |= {"repeat_last_n": -1, "presence_penalty": 0.5, "frequency_penalty": 0.25, "mirostat": 2, "seed": 3}
    options |= {"mirostat_tau": 4.0, "mirostat_eta": 0.2, "num_predict": 9, "stop": ["x", "y"], "num_ctx": 2048}
    assert post(engine, {**BODY, "options": options, "keep_alive": "10m"}).status_code == 200
    made = engine.asked[-1][1]
    assert (made.temperature, made.top_k, made.top_p, made.min_p, made.typical_p) == (0.25, 5, 0.5, 0.1, 0.9)
    assert (made.repetition_penalty, made.presence_penalty, made.frequency_penalty) == (1.2, 0.5, 0.25)
    assert (made.mirostat, made.mirostat_tau, made.mirostat_eta, made.seed) == (2, 4.0, 0.2, 3)
    assert (made.max_tokens, made.stop) == (9, ("x", "y"))
    whole_context = ({"repeat_last_n": 0, "repeat_penalty": 1.3, "num_predict": -2, "seed": -1}, {"num_predict": -1})
    for given in (*whole_context, {"num_predict": 0}):
        assert post(engine, {**BODY, "options": given}).status_code == 200
        made = engine.asked[-1][1]
        assert (made.repetition_penalty, made.max_tokens, made.seed) == (1.0, None, None)
    assert post(engine, {**BODY, "options": {"num_predict": 200_000}}).status_code == 200
    prompt, made, _ = engine.asked[-1]
    assert len(prompt) + made.max_tokens == 100_000
    assert post(engine, {**BODY, "options": {"top_p": 0, "top_k": 40}}).status_code == 200
    assert engine.asked[-1][1].top_k == 1


@pytest.mark.parametrize("reach", [64, 100_000, 200_000])
def test_a_reach_of_the_whole_text_and_ollamas_default_go_with_penalties(reach: int) -> None:
    engine = ScriptedEngine()
    answer = post(engine, {**BODY, "options": {"repeat_penalty": 1.1, "repeat_last_n": reach}})
    assert answer.status_code == 200, answer.text
    assert engine.asked[-1][1].repetition_penalty == 1.1


def test_clients_that_ask_to_cut_prompts_are_answered_as_long_as_these_fit() -> None:
    asking = {**BODY, "truncate": True, "shift": True}
    assert post(ScriptedEngine(), asking).status_code == 200
    full = post(ScriptedEngine(), {**asking, "messages": [{"role": "user", "content": "word " * 110_000}]})
    assert (full.status_code, "context" in full.json()["error"]) == (400, True)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": ""}, "model"),
    ({"messages": {"role": "user"}}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images"),
    ({"messages": [{"role": "user", "content": "x", "imags": 1}]}, "messages[0].imags"),
    ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"tools": [{"type": "web"}]}, "tools[0].type"),
    ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"function": {"name": "a", "parameters": 7}}]}, "tools[0].function.parameters"),
    ({"format": "xml"}, "format"),
    ({"think": "hard"}, "think"),
    ({"think": "low"}, "think"),
    ({"template": "{{ .Prompt }}"}, "template"),
    ({"truncate": "yes"}, "truncate"),
    ({"shift": 1}, "shift"),
    ({"stream": "yes"}, "stream"),
    ({"keep_alive": []}, "keep_alive"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 99}, "top_logprobs"),
    ({"options": {"temperature": -1}}, "options.temperature"),
    ({"options": {"temperature": "hot"}}, "options.temperature"),
    ({"options": {"temprature": 1}}, "options.temprature"),
    ({"options": {"num_predict": -3}}, "options.num_predict"),
    ({"options": {"num_predict": 10**400}}, "options.num_predict"),
    ({"options": {"mirostat": 1}}, "options.mirostat"),
    ({"options": {"tfs_z": 0.5}}, "options.tfs_z"),
    ({"options": {"repeat_penalty": 1.1, "repeat_last_n": 32}}, "options.repeat_last_n"),
    ({"options": {"repeat_last_n": -2}}, "options.repeat_last_n"),
    ({"options": {"stop": ["a"] * 99}}, "options.stop"),
    ({"options": {"stop": [""]}}, "options.stop"),
    ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
    ({"unknown": 1}, "unknown"),
]


@pytest.mark.parametrize(
    ("fields", "path"), REFUSED, ids=[f"{path} {place}" for place, (_, path) in enumerate(REFUSED)]
)
def test_refusals_name_the_field(fields: dict[str, Any], path: str) -> None:
    response = post(ScriptedEngine(), {**BODY, **fields})
    assert response.status_code == 400, response.text
    (message,) = response.json().values()
    assert path in message


@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_ollamas_form(stream: bool) -> None:
    body = {**BODY, "stream": stream}
    full = post(ScriptedEngine(refusal=QueueFullError("full")), body)
    assert (full.status_code, full.json()) == (429, {"error": "full"})
    wrong = post(ScriptedEngine(refusal=InvalidRequestError("max_tokens is odd", "max_tokens")), body)
    assert (wrong.status_code, set(wrong.json())) == (400, {"error"})
    unknown = post(ScriptedEngine(), {**body, "model": "other"})
    assert (unknown.status_code, "not found" in unknown.json()["error"]) == (404, True)


def test_an_error_in_mid_stream_is_the_last_line() -> None:
    lines = lines_of(post(ScriptedEngine(deltas=("</think>Hel", EngineDeadError("gone"))), BODY))
    assert set(lines[-1]) == {"error"}
    assert "engine stopped" in lines[-1]["error"]
    assert all(not line["done"] for line in lines[:-1])


def ask(
    method: str, path: str, settings: ServerSettings, engine: ScriptedEngine | None = None, **options: Any
) -> httpx.Response:
    app = create_app(cast("Any", engine or ScriptedEngine()), scripted_model(TEMPLATE), settings)

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.request(method, path, **options)

    return asyncio.run(main())


def test_the_root_answers_without_a_page() -> None:
    response = ask("GET", "/", ServerSettings(web_page=False, api_keys=("k",)))
    assert (response.status_code, response.text) == (200, "Ollama is running")
    assert ask("GET", "/", ServerSettings()).headers["content-type"].startswith("text/html")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/chat", 405),
        ("POST", "/api/tags", 405),
        ("POST", "/api/delete", 405),
        ("POST", "/api/blobs/sha256:00", 400),
        ("POST", "/api/chat/", 404),
        ("GET", "/api/web_search", 404),
    ],
)
def test_what_is_not_there_is_refused_in_the_same_form(method: str, path: str, status: int) -> None:
    response = ask(method, path, ServerSettings(), json=BODY)
    assert (response.status_code, set(response.json())) == (status, {"error"})


def test_all_routes_need_the_key() -> None:
    for route in OLLAMA.routes:
        response = ask(route.method, route.path, ServerSettings(api_keys=("k",)), json=BODY)
        assert (response.status_code, set(response.json())) == (401, {"error"}), route.path
    allowed = ask("GET", "/api/tags", ServerSettings(api_keys=("k",)), headers={"authorization": "Bearer k"})
    assert allowed.json()["models"][0]["name"] == "scripted:latest"


class LateEngine(ScriptedEngine):
    """Its answers begin after 0.3 s."""

    def _play(self, *asked: Any) -> None:
        asyncio.get_running_loop().call_later(0.3, super()._play, *asked)


def test_pings_are_space_between_the_lines() -> None:
    response = ask("POST", "/api/chat", ServerSettings(ping_interval_s=0.05), LateEngine(), json=BODY)
    assert response.text.startswith(" ")
    lines = lines_of(response)
    assert (joined(lines)["thinking"], lines[-1]["done"]) == ("Hello", True)
