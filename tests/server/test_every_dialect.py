"""What holds in every dialect alike, with a scripted engine."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import anthropic
import httpx
import httpx2
import ollama
import openai
import pydantic
import pytest
from starlette.applications import Starlette

from realizar.sampling_params import SamplingParams
from realizar.server.app import create_app
from realizar.server.settings import ServerSettings
from server.scripted_engine import ScriptedEngine, events_of, scripted_model
from server.stepwise_engine import StepwiseEngine

CONTEXT = 100_000
THINKING = (
    "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}|{% endfor %}<think>"
)
HI = [{"role": "user", "content": "Hi"}]


@dataclass(frozen=True)
class Route:
    """A route that generates. Attributes: body: of a question. unbounded: that of one for the whole context, if any."""

    path: str
    body: Mapping[str, Any]
    unbounded: Mapping[str, Any] = field(default_factory=dict)


WHOLE = {"stream": False}
ROUTES = {
    "chat": Route("/v1/chat/completions", {"messages": HI}),
    "completions": Route("/v1/completions", {"prompt": "Hi"}),
    "responses": Route("/v1/responses", {"input": "Hi"}),
    "ollama": Route("/api/chat", {"messages": HI, **WHOLE}, {"options": {"num_predict": -1}}),
    "generate": Route("/api/generate", {"prompt": "Hi", **WHOLE}, {"options": {"num_predict": -2}}),
    "raw": Route("/api/generate", {"prompt": "Hi", "raw": True, **WHOLE}, {"options": {"num_predict": 0}}),
}


def sampling_of(route: Route, default: SamplingParams, **fields: Any) -> SamplingParams:
    """The sampling that a request reaches the engine with."""
    engine = ScriptedEngine()
    app = create_app(cast("Any", engine), replace(scripted_model(), default_sampling=default), ServerSettings())

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post(route.path, json={"model": "scripted", **route.body, **fields})

    answer = asyncio.run(main())
    assert answer.status_code == 200, answer.text
    return engine.asked[-1][1]


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES.keys())
def test_the_servers_max_tokens_are_the_default_of_requests(route: Route) -> None:
    assert sampling_of(route, SamplingParams(max_tokens=10)).max_tokens == 10
    # A default that is more than the context leaves is no fault of the request.
    bounded = sampling_of(route, SamplingParams(max_tokens=CONTEXT)).max_tokens
    assert bounded is not None
    assert CONTEXT - 50 < bounded < CONTEXT
    if route.unbounded:
        assert sampling_of(route, SamplingParams(max_tokens=10), **route.unbounded).max_tokens is None


ASK: list[Any] = [{"role": "user", "content": "Hi"}]
GO_ON: list[Any] = [{"role": "user", "content": "Go on."}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
ANSWERS = {
    "text": "</think>Yes.",
    "reasoning": "Hm, so it",
    "reasoning and text": "Hm.</think>\n\nYes\u00e9\U0001f600.",
    "nothing": "</think>",
    "a call": f"</think>{CALL}",
    "reasoning and a call": f"Hm.</think>\n{CALL}",
    "text and calls": f"</think>Let me see.\n{CALL}\n{CALL}",
}
IDS = re.compile('"id": "[^"]*"')


class Talk(Protocol):
    """Asks with an official client, whose helper puts a stream together; returns what goes into the next request."""

    async def __call__(self, app: Starlette, history: list[Any], *, stream: bool) -> list[Any]: ...


async def talk_chat(app: Starlette, history: list[Any], *, stream: bool) -> list[Any]:
    transport = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    async with openai.AsyncOpenAI(base_url="http://server/v1", api_key="x", http_client=transport) as client:
        tools = [{"type": "function", "function": FUNCTION}]
        given: dict[str, Any] = {"model": "scripted", "messages": history, "tools": tools}
        if not stream:
            return [(await client.chat.completions.create(**given)).choices[0].message]
        async with client.chat.completions.stream(**given) as events:
            return [(await events.get_final_completion()).choices[0].message]


async def talk_responses(app: Starlette, history: list[Any], *, stream: bool) -> list[Any]:
    transport = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    async with openai.AsyncOpenAI(base_url="http://server/v1", api_key="x", http_client=transport) as client:
        tools = [{"type": "function", **FUNCTION, "strict": False}]
        given: dict[str, Any] = {"model": "scripted", "input": history, "tools": tools}
        if not stream:
            return list((await client.responses.create(**given)).output)
        async with client.responses.stream(**given) as events:
            return list((await events.get_final_response()).output)


async def talk_messages(app: Starlette, history: list[Any], *, stream: bool) -> list[Any]:
    transport = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    async with anthropic.AsyncAnthropic(base_url="http://server", api_key="x", http_client=transport) as client:
        tools = [{"name": "f", "input_schema": SCHEMA}]
        given: dict[str, Any] = {"model": "scripted", "max_tokens": 999, "messages": history, "tools": tools}
        if not stream:
            return [{"role": "assistant", "content": (await client.messages.create(**given)).content}]
        async with client.messages.stream(**given) as events:
            return [{"role": "assistant", "content": (await events.get_final_message()).content}]


async def talk_ollama(app: Starlette, history: list[Any], *, stream: bool) -> list[Any]:
    """Ollama's client has no such helper: its users join the parts of messages."""
    client = ollama.AsyncClient("http://server", transport=httpx.ASGITransport(app))
    tools = [{"type": "function", "function": FUNCTION}]
    given: dict[str, Any] = {"model": "scripted", "messages": history, "tools": tools}
    if not stream:
        return [(await client.chat(**given)).message]
    parts = [part.message async for part in await client.chat(**given, stream=True)]
    calls = [call for part in parts for call in part.tool_calls or ()]
    thinking = "".join(part.thinking or "" for part in parts)
    content = "".join(part.content or "" for part in parts)
    return [ollama.Message(role="assistant", content=content, thinking=thinking or None, tool_calls=calls or None)]


TALKS: dict[str, Talk] = {
    "chat": talk_chat,
    "responses": talk_responses,
    "messages": talk_messages,
    "ollama": talk_ollama,
}


def results_of(name: str, said: list[Any]) -> list[Any]:
    """Results of all calls of an answer."""
    if name == "chat":
        ids = [call.id for call in said[0].tool_calls or ()]
        return [{"role": "tool", "tool_call_id": each, "content": "7"} for each in ids]
    if name == "responses":
        ids = [item.call_id for item in said if item.type == "function_call"]
        return [{"type": "function_call_output", "call_id": each, "output": "7"} for each in ids]
    if name == "messages":
        ids = [block.id for block in said[0]["content"] if block.type == "tool_use"]
        blocks = [{"type": "tool_result", "tool_use_id": each, "content": "7"} for each in ids]
        return [{"role": "user", "content": blocks}] if blocks else []
    return [{"role": "tool", "tool_name": "f", "content": "7"} for _ in said[0].tool_calls or ()]


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
@pytest.mark.parametrize("name", TALKS)
def test_a_stream_put_together_is_the_whole_answer_and_can_be_sent_back(name: str, answer: str) -> None:
    engine = StepwiseEngine(answer=answer)
    app = create_app(cast("Any", engine), scripted_model(THINKING), ServerSettings())
    talk = TALKS[name]

    async def main() -> None:
        whole = await talk(app, ASK, stream=False)
        for engine.step in (1, 4, 1000):
            streamed = await talk(app, ASK, stream=True)
            assert shown(streamed) == shown(whole)
        prompts = set()
        for said in (whole, streamed):
            await talk(app, [*ASK, *said, *results_of(name, said), *GO_ON], stream=False)
            prompts.add(IDS.sub("", bytes(engine.asked[-1][0]).decode()))
        assert len(prompts) == 1  # and the model is shown the same of both

    asyncio.run(main())


async def listed_logprobs(
    http: httpx.AsyncClient, name: str, fields: dict[str, Any], *, stream: bool
) -> tuple[str, str]:
    """An answer's content, and what the tokens of its log-probabilities spell."""
    stop = {"stop": fields["stop"]} if "stop" in fields else {}
    if name == "responses":
        wanted = {
            "input": ASK,
            "include": ["message.output_text.logprobs"],
            "tools": [{"type": "function", **FUNCTION}],
        }
        text = (await http.post("/v1/responses", json={**wanted, "stream": stream})).text
        if stream:
            text = json.dumps(json.loads(text.strip().split("data: ")[-1])["response"])
        parts = [part for item in json.loads(text)["output"] if item["type"] == "message" for part in item["content"]]
        return "".join(part["text"] for part in parts), spelled(each for part in parts for each in part["logprobs"])
    body = {"messages": ASK, "logprobs": True, "tools": [{"type": "function", "function": FUNCTION}], "stream": stream}
    if name == "ollama":
        answer = await http.post("/api/chat", json={"model": "scripted", **body, "options": stop})
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert all("logprobs" not in line for line in lines if not any(line["message"].values()))
        return "", spelled(each for line in lines for each in line.get("logprobs", ()))
    answer = await http.post("/v1/chat/completions", json={**body, **stop})
    if not stream:
        (choice,) = answer.json()["choices"]
        return choice["message"]["content"] or "", spelled(choice["logprobs"]["content"])
    choices = [json.loads(event)["choices"][0] for event in events_of(answer.text) if event != "[DONE]"]
    for each in choices:  # tokens come with their text
        if each["logprobs"] is not None:
            assert spelled(each["logprobs"]["content"]) == each["delta"]["content"]
    found = [entry for each in choices if each["logprobs"] for entry in each["logprobs"]["content"]]
    return "".join(each["delta"].get("content") or "" for each in choices), spelled(found)


def text_before(answer: str, fields: dict[str, Any]) -> str:
    """All of an answer up to its stop: Ollama lists the tokens of reasoning and calls too."""
    return answer.split(fields["stop"][0])[0] if fields else answer


def spelled(entries: Iterable[dict[str, Any]]) -> str:
    return bytes(byte for entry in entries for byte in entry["bytes"]).decode()


@pytest.mark.parametrize("answer", [*ANSWERS.values(), "Hm.</think>Hello! How can I", "</think>no stop How "])
@pytest.mark.parametrize("name", ["chat", "responses", "ollama"])
def test_log_probabilities_are_of_the_text_alone(name: str, answer: str) -> None:
    """Not of reasoning, of calls, of a stop string that was cut, or of what ends an answer."""
    engine = StepwiseEngine(answer=answer)
    app = create_app(cast("Any", engine), scripted_model(THINKING), ServerSettings())

    async def main() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            for engine.step in (1, 4, 1000):
                for stream in (False, True):
                    for fields in ({}, {"stop": ["How can"]}):
                        content, tokens = await listed_logprobs(http, name, fields, stream=stream)
                        assert tokens == (content if name != "ollama" else text_before(answer, fields))

    asyncio.run(main())


def shown(said: Any) -> Any:
    """What an answer has, without ids, nulls and what clients' helpers add."""
    if isinstance(said, pydantic.BaseModel):
        return shown(said.model_dump())
    if isinstance(said, list):
        return [shown(each) for each in said]
    if not isinstance(said, dict):
        return said
    added = ("id", "call_id", "index", "parsed", "parsed_arguments")
    return {name: shown(value) for name, value in said.items() if value is not None and name not in added}
