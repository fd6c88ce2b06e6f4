"""Values inside fields, and combinations of fields, are honoured or refused by their path."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any, cast

import httpx
import pytest

from realizar.sampling_params import SamplingParams, StructuredOutput
from realizar.server.app import create_app
from realizar.server.generation.sampling import PLAIN_FIELDS
from realizar.server.settings import ServerSettings
from server.scripted_engine import ScriptedEngine, scripted_model

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = {"role": "user", "content": "Hi"}
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": [HI]}, TEXT: {"prompt": "Hi"}}
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or () %}{{ c | tojson }}{% endfor %}{% endfor %}"
)


def tool(name: str = "a", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def ask(
    path: str, body: Any, template: str = TEMPLATE, *, allow_request_priority: bool = True, **model: Any
) -> tuple[httpx.Response, ScriptedEngine]:
    engine = ScriptedEngine()
    served = replace(scripted_model(template), **model)
    settings = ServerSettings(embeddings="last", allow_request_priority=allow_request_priority)
    app = create_app(cast("Any", engine), served, settings)

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            headers = {"content-type": "application/json"}
            return await client.post(path, content=json.dumps(body), headers=headers)

    return asyncio.run(main()), engine


@pytest.mark.parametrize(
    ("fields", "param", "near"),
    [
        ({"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge", "include_usage"),
        ({"tools": [tool(parametrs={})]}, "tools[0].function.parametrs", "parameters"),
        ({"tools": [{**tool(), "functions": {}}]}, "tools[0].functions", "function"),
        ({"response_format": {"type": "text", "json_shema": {}}}, "response_format.json_shema", "json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "shema": {}}}},
            "response_format.json_schema.shema",
            "schema",
        ),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "regex"),
        ({"tools": [tool()], "tool_choice": {**tool(), "functions": 1}}, "tool_choice.functions", "function"),
        ({"tools": [tool()], "tool_choice": tool(names="a")}, "tool_choice.function.names", "name"),
        (
            {
                "tools": [tool()],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tool": 1, "tools": [tool()]},
                },
            },
            "tool_choice.allowed_tools.tool",
            "tools",
        ),
        (
            {
                "tools": [tool()],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tool": 1,
                    "allowed_tools": {"mode": "auto", "tools": [tool()]},
                },
            },
            "tool_choice.allowed_tool",
            "allowed_tools",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_names_inside_of_fields(fields: dict[str, Any], param: str, near: str) -> None:
    response, engine = ask(CHAT, {**BODIES[CHAT], **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, "unknown_parameter"), error
    assert f"did you mean {near}?" in error["message"]
    assert not engine.asked


def test_a_tool_may_be_allowed_by_its_definition() -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [tool(description="x")]}}
    response, _ = ask(CHAT, {**BODIES[CHAT], "tools": [tool(description="x")], "tool_choice": choice})
    assert response.status_code == 200


def test_a_tool_that_is_allowed_again_and_again_is_shown_once() -> None:
    def asked(times: int) -> tuple[int, dict[str, Any], ScriptedEngine]:
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool()] * times}}
        response, engine = ask(CHAT, {**BODIES[CHAT], "tools": [tool()], "tool_choice": choice})
        return response.status_code, response.json(), engine

    (once, _, first), (twice, _, second) = asked(1), asked(2)
    assert (once, twice) == (200, 200)
    assert first.asked == second.asked
    status, answer, _ = asked(129)
    assert (status, answer["error"]["param"]) == (400, "tool_choice.allowed_tools.tools")


SCHEMA = {"name": "x", "schema": {"type": "integer"}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"response_format": {"type": "text", "json_schema": SCHEMA}}, "response_format.json_schema"),
        (CHAT, {"response_format": {"type": "json_object", "json_schema": SCHEMA}}, "response_format.json_schema"),
        (TEXT, {"response_format": {"type": "text", "json_schema": SCHEMA}}, "response_format.json_schema"),
        (CHAT, {"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters.type"),
        (CHAT, {"tools": [tool(parameters={"type": ["object", "null"]})]}, "tools[0].function.parameters.type"),
        ("/tokenize", {"messages": [HI], "tools": [tool(parameters={"type": 5})]}, "tools[0].function.parameters.type"),
        *((path, {"n": 2, "best_of": count}, "best_of") for path in BODIES for count in (1, 3, "2", True)),
        *((path, {"best_of": 2}, "best_of") for path in BODIES),
        *((path, {"logit_bias": {"5": 1, "05": 2}}, "logit_bias") for path in BODIES),
        ("/tokenize", {"messages": [HI], "add_special_tokens": True}, "add_special_tokens"),
        (CHAT, {"messages": [HI] * 4097}, "messages"),
        *((path, {"priority": sign * 101}, "priority") for path in BODIES for sign in (-1, 1)),
        (CHAT, {"web_search_options": {}}, "web_search_options"),
        (CHAT, {"moderation": {}}, "moderation"),
        (CHAT, {"audio": {}}, "audio"),
        *((CHAT, {"service_tier": tier}, "service_tier") for tier in ("flex", "priority", "fast", "")),
        *(
            (
                path,
                {"stream": True, "stream_options": {"include_obfuscation": True}},
                "stream_options.include_obfuscation",
            )
            for path in BODIES
        ),
        (TEXT, {"prompt": ["x"] * 64, "stop_token_ids": list(range(256)) * 17}, "stop_token_ids"),
        (TEXT, {"prompt": ["x"] * 1100, "logit_bias": {str(key): 1 for key in range(256)}}, "logit_bias"),
        *((path, {"priority": 2**70}, "priority") for path in BODIES),
    ],
    ids=lambda value: str(value)[:80],
)
def test_refused_by_name(path: str, fields: dict[str, Any], param: str) -> None:
    response, engine = ask(path, {**BODIES.get(path, {}), **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert not engine.asked


def test_tokens_are_counted_as_a_chat_counts_them() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson if tools }}{{ x }}"
    body = {"messages": [HI], "tools": [tool(strict=True, description="y")], "chat_template_kwargs": {"x": "z"}}
    _, engine = ask(CHAT, body, template)
    answer, _ = ask("/tokenize", body, template)
    assert tuple(answer.json()["tokens"]) == engine.asked[0][0]
    assert b"strict" not in bytes(answer.json()["tokens"])


RUSSIAN = "ж" * 45_000  # 90,000 tokens of the scripted model; 270,000 as escapes, above its context


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [tool(description=RUSSIAN)]},
        {"documents": [{"text": RUSSIAN}]},
        {"messages": [HI, {"role": "assistant", "tool_calls": [{**tool(arguments={"x": RUSSIAN}), "id": "1"}]}]},
        {"chat_template_kwargs": {"x": RUSSIAN}},
    ],
    ids=["tools", "documents", "arguments", "variables"],
)
def test_text_that_is_not_ascii_is_as_long_as_the_template_writes_it(fields: dict[str, Any]) -> None:
    template = TEMPLATE + "{{ tools | tojson if tools }}{{ documents | tojson if documents }}{{ x }}"
    response, engine = ask(CHAT, {"messages": [HI], **fields}, template)
    assert response.status_code == 200, response.text[:300]
    assert RUSSIAN in bytes(engine.asked[0][0]).decode()


@pytest.mark.parametrize(
    "calls",
    [
        [{"id": "1", "type": "custom", "custom": {"name": "x", "input": "y"}}],
        [{"id": "1", "type": ["function"], "function": {"name": "x", "arguments": "{}"}}],
    ],
    ids=["custom", "no text"],
)
def test_other_calls_are_refused_by_their_type(calls: list[Any]) -> None:
    response, _ = ask(CHAT, {"messages": [HI, {"role": "assistant", "tool_calls": calls}]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages[1].tool_calls[0].type")


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_surrogates_inside_of_arguments(path: str) -> None:
    """The arguments' own JSON is read after the body's."""
    call = {"id": "1", "type": "function", "function": {"name": "a", "arguments": '{"x": "\\ud800"}'}}
    response, _ = ask(path, {"messages": [HI, {"role": "assistant", "tool_calls": [call]}]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize("name", ["self", "messages", "tools", "add_generation_prompt", "no name", ""])
def test_variables_that_templates_can_not_have(path: str, name: str) -> None:
    response, _ = ask(path, {"messages": [HI], "chat_template_kwargs": {name: "v"}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, f"chat_template_kwargs.{name}")


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize("name", ["thinking", "context", "environment", "variables", "class_", "raise_exception", "_"])
def test_variables_that_templates_can_have(path: str, name: str) -> None:
    body = {"messages": [HI], "chat_template_kwargs": {name: "v"}}
    response, engine = ask(path, body, f"{{{{ messages[0].content }}}}{{{{ {name} }}}}")
    assert response.status_code == 200, response.text
    ids = engine.asked[0][0] if path == CHAT else response.json()["tokens"]
    assert bytes(ids) == b"Hiv"


def test_none_of_what_is_not_asked_for_is_neutral() -> None:
    for fields in ({"top_logprobs": 0}, {"logprobs": False, "top_logprobs": 0}, {"n": 2, "best_of": 2}, {"best_of": 1}):
        response, _ = ask(CHAT, {**BODIES[CHAT], **fields})
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["logprobs"] is None


OTHER_VALUES: dict[str, Any] = {
    "n": 2,
    "seed": 5,
    "temperature": 0.25,
    "top_p": 0.5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "top_k": 3,
    "min_p": 0.1,
    "typical_p": 0.9,
    "top_n_sigma": 1.5,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "dry_multiplier": 0.5,
    "dry_base": 2.5,
    "dry_allowed_length": 4,
    "dry_penalty_last_n": 9,
    "mirostat": 2,
    "mirostat_tau": 3.0,
    "mirostat_eta": 0.3,
    "repetition_penalty": 1.5,
    "min_tokens": 2,
    "ignore_eos": True,
}


@pytest.mark.parametrize("path", BODIES)
def test_every_sampling_field_reaches_the_engine(path: str) -> None:
    assert set(OTHER_VALUES) == set(PLAIN_FIELDS)
    for name, value in OTHER_VALUES.items():
        assert getattr(SamplingParams(), name) != value
        response, engine = ask(path, {**BODIES[path], name: value})
        assert response.status_code == 200, response.text
        assert getattr(engine.asked[0][1], name) == value
    fields = {"stop": ["x", "y"], "stop_token_ids": [7, 8], "logit_bias": {"9": 1.5}, "max_tokens": 5}
    response, engine = ask(path, {**BODIES[path], **fields, "priority": 3, "cache_salt": "s"})
    _, sampling, options = engine.asked[0]
    assert (sampling.stop, sampling.stop_token_ids, dict(sampling.logit_bias)) == (("x", "y"), (7, 8), {9: 1.5})
    assert (sampling.max_tokens, options["priority"], options["cache_salt"]) == (5, 3, "s")


@pytest.mark.parametrize("path", BODIES)
def test_a_request_goes_before_the_models_own_values(path: str) -> None:
    own = SamplingParams(temperature=0.3, top_k=5, top_p=0.7, stop_token_ids=(9,), repetition_penalty=1.2)
    fields = {"temperature": 0.0, "top_k": 0, "top_p": None}
    _, engine = ask(path, {**BODIES[path], **fields}, default_sampling=own)
    sampling = engine.asked[0][1]
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.0, 0, 0.7)
    assert (sampling.stop_token_ids, sampling.repetition_penalty) == ((9,), 1.2)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
            StructuredOutput("json_schema", '{"type": "integer"}'),
        ),
        ({"guided_json": {"type": "integer"}}, StructuredOutput("json_schema", '{"type": "integer"}')),
        ({"guided_json": '{"type": "null"}'}, StructuredOutput("json_schema", '{"type": "null"}')),
        ({"guided_regex": "a+"}, StructuredOutput("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, StructuredOutput("choice", '["a", "b"]')),
        ({"guided_grammar": 'start: "a"'}, StructuredOutput("lark", 'start: "a"')),
        ({"structured_outputs": {"json": True}}, StructuredOutput("json_schema", "true")),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput("regex", "a+")),
        ({"structured_outputs": {"choice": ["a"]}}, StructuredOutput("choice", '["a"]')),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, StructuredOutput("lark", 'start: "a"')),
        ({"structured_outputs": {"json_object": True}}, StructuredOutput("json_object")),
        ({"structured_outputs": {"json_object": False}}, None),
    ],
    ids=str,
)
def test_every_way_to_constrain_an_answer(path: str, fields: dict[str, Any], wanted: StructuredOutput | None) -> None:
    response, engine = ask(path, {**BODIES[path], **fields})
    assert response.status_code == 200, response.text
    assert engine.asked[0][1].structured == wanted


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_server_may_take_no_priority_from_requests(path: str) -> None:
    """Any client could pass all others; 0 is what everybody has."""
    for priority, status in ((None, 200), (0, 200), (1, 400), (-1, 400)):
        response, engine = ask(path, {**BODIES[path], "priority": priority}, allow_request_priority=False)
        assert response.status_code == status
        if status == 400:
            assert "--allow-request-priority" in response.json()["error"]["message"]
            assert not engine.asked
