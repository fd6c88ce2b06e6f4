"""Reasoning and tool calls taken out of what a model wrote, streamed and whole, with a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import httpx
import pytest

from realizar.engine.frontend.async_stream import AsyncStream
from realizar.engine.frontend.outputs import CompletionOutput, RequestOutput, Timings
from realizar.outputs import SnapshotUse
from realizar.sampling_params import SamplingParams
from realizar.server.app import create_app
from realizar.server.settings import ServerSettings
from server.scripted_engine import (
    ScriptedCapacity,
    ScriptedChoice,
    ScriptedEngine,
    ScriptedInfo,
    events_of,
    scripted_model,
)

THINKING = (
    "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is not defined or enable_thinking %}<think>{% endif %}"
)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("a", "b")
]
CALLS = (
    '<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>'
)


def cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


class Answer:
    """A whole answer's parts, or those that a stream's chunks make up."""

    def __init__(self) -> None:
        self.content, self.reasoning, self.reason = "", "", ""
        self.calls: list[tuple[str, str]] = []

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def of_whole(cls, body: dict[str, Any]) -> Answer:
        answer, choice = cls(), body["choices"][0]
        message = choice["message"]
        answer.content, answer.reasoning = message["content"] or "", message.get("reasoning_content", "")
        answer.calls = [
            (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
        ]
        answer.reason = choice["finish_reason"]
        return answer

    @classmethod
    def of_stream(cls, text: str) -> Answer:
        answer = cls()
        for event in events_of(text):
            if event == "[DONE]":
                break
            (choice,) = json.loads(event)["choices"]
            delta = choice["delta"]
            answer.content += delta.get("content") or ""
            answer.reasoning += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(answer.calls):
                    assert call["id"]
                    assert call["type"] == "function"
                    answer.calls.append((call["function"]["name"], ""))
                name, arguments = answer.calls[call["index"]]
                answer.calls[call["index"]] = (name, arguments + call["function"]["arguments"])
            answer.reason = choice["finish_reason"] or answer.reason
        return answer


def answer(engine: ScriptedEngine, template: str = THINKING, **fields: Any) -> Answer:
    """The answer, the same streamed and whole."""
    app = create_app(cast("Any", engine), scripted_model(template), ServerSettings())
    body = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}], **fields}

    async def main() -> tuple[dict[str, Any], str]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            whole = await client.post("/v1/chat/completions", json=body)
            assert whole.status_code == 200, whole.text
            return whole.json(), (await client.post("/v1/chat/completions", json={**body, "stream": True})).text

    whole, stream = asyncio.run(main())
    assert Answer.of_whole(whole) == Answer.of_stream(stream)
    return Answer.of_whole(whole)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_is_split_out(size: int) -> None:
    made = answer(ScriptedEngine(deltas=cut("I ponder.</think>Yes.", size)))
    assert (made.reasoning, made.content, made.reason) == ("I ponder.", "Yes.", "stop")
    hidden = answer(ScriptedEngine(deltas=cut("I ponder.</think>Yes.", size)), include_reasoning=False)
    assert (hidden.reasoning, hidden.content) == ("", "Yes.")


def test_reasoning_disabled() -> None:
    for fields in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        engine = ScriptedEngine(deltas=("Yes.",))
        made = answer(engine, **fields)
        assert (made.reasoning, made.content) == ("", "Yes.")
        assert bytes(engine.asked[0][0]) == b"Hi"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_calls_in_the_models_style(size: int) -> None:
    engine = ScriptedEngine(deltas=cut(f"Hm.</think>Let me see.\n{CALLS}", size))
    made = answer(engine, tools=TOOLS)
    assert made.calls == [("a", '{"x": 1}'), ("b", "{}")]
    assert (made.content, made.reasoning, made.reason) == ("Let me see.", "Hm.", "tool_calls")
    assert engine.num_closed == 0


def test_one_call_where_one_is_allowed() -> None:
    engine = ScriptedEngine(deltas=cut(f"</think>{CALLS}", 5))
    made = answer(engine, tools=TOOLS, parallel_tool_calls=False)
    assert (made.calls, made.reason) == ([("a", '{"x": 1}')], "tool_calls")


class TwoChoices(ScriptedEngine):
    """The first choice calls and writes on, for which the engine drops snapshots; then the second ends."""

    @property
    def info(self) -> ScriptedInfo:
        return ScriptedInfo(capacity=ScriptedCapacity(num_snapshots=4))

    def _play(self, stream: AsyncStream, prompt: tuple[int, ...], sampling: SamplingParams) -> None:
        first, second = ScriptedChoice(stream, 0), ScriptedChoice(stream, 1)
        first.gain(f"</think>{CALLS}", snapshots=SnapshotUse(taken=1))
        second.gain("</think>Hel")

        def go_on() -> None:
            first.gain("more", snapshots=SnapshotUse(taken=1, dropped=3))
            second.gain("lo", finish_reason="stop", snapshots=SnapshotUse(restored=1))
            ended = CompletionOutput(0, "", (65,), "stop")
            stream.end(RequestOutput(stream.request_id, None, prompt, (ended,) * 2, Timings(0.0, 0.1, 0.2, 0.3)))

        asyncio.get_running_loop().call_later(0.05, go_on)


def test_snapshots_of_a_choice_that_a_call_ended_count_to_its_end() -> None:
    app = create_app(cast("Any", TwoChoices()), scripted_model(THINKING), ServerSettings())
    body = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}], "n": 2, "tools": TOOLS}

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post("/v1/chat/completions", json={**body, "parallel_tool_calls": False})

    usage = asyncio.run(main()).json()["usage"]
    assert usage["state_snapshots"] == {"taken": 1, "restored": 1, "fetched": 0, "dropped": 3}


def test_the_engine_stops_after_the_one_call() -> None:
    engine = ScriptedEngine(deltas=[*cut(f"</think>{CALLS}", 1000), None])
    made = answer(engine, tools=TOOLS, parallel_tool_calls=False)
    assert (made.calls, engine.num_closed) == ([("a", '{"x": 1}')], 2)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_the_usage_of_an_answer_that_ended_early(stream: bool) -> None:
    deltas = cut(f"</think>{CALLS}", 20)
    engine = ScriptedEngine(deltas=[*deltas, None], num_cached=5)
    app = create_app(cast("Any", engine), scripted_model(THINKING), ServerSettings())
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": TOOLS,
        "parallel_tool_calls": False,
        "stream": stream,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True} if stream else None,
    }

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post("/v1/chat/completions", json=body)

    response = asyncio.run(main())
    answers = [json.loads(event) for event in list(events_of(response.text))[:-1]] if stream else [response.json()]
    assert answers[-1]["usage"] == {
        "prompt_tokens": len(engine.asked[0][0]),
        "completion_tokens": len(deltas),
        "total_tokens": len(engine.asked[0][0]) + len(deltas),
        "prompt_tokens_details": {"cached_tokens": 5},
    }
    assert all(answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 5 for answer in answers)
    assert engine.num_closed == 1


def test_without_tools_calls_are_text() -> None:
    engine = ScriptedEngine(deltas=cut(f"</think>{CALLS}", 4))
    assert answer(engine).content == CALLS
    assert answer(engine, tools=TOOLS, tool_choice="none").content == CALLS


def test_forced_and_strict_calls_reach_the_engine_as_grammars() -> None:
    engine = ScriptedEngine(deltas=cut(f"</think>{CALLS}", 1000))
    answer(engine, tools=TOOLS, tool_choice="required")
    answer(engine, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "b"}})
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
    answer(engine, tools=strict)
    answer(engine, tools=TOOLS)
    grammars = [sampling.structured for _, sampling, _ in engine.asked[::2]]
    assert [grammar.kind for grammar in grammars[:3]] == ["lark"] * 3
    assert '\\"name\\": \\"a\\"' in grammars[0].value
    assert '\\"name\\": \\"a\\"' not in grammars[1].value
    assert grammars[3] is None
    assert b"strict" not in bytes(engine.asked[4][0])  # that is between the caller and the grammar


def test_an_answer_that_ended_early_is_in_the_figures() -> None:
    """A named call always ends so."""
    engine = ScriptedEngine(deltas=[f"</think>{CALLS}", None])
    app = create_app(cast("Any", engine), scripted_model(THINKING), ServerSettings())
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "a"}},
    }

    async def main() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            for fields in ({}, {"stream": True}, {"n": 3}):
                assert (await client.post("/v1/chat/completions", json={**body, **fields})).status_code == 200
            return (await client.get("/metrics")).text

    text = asyncio.run(main())
    for line in (
        'realizar:request_success_total{finished_reason="stop",model_name="scripted"} 5.0',
        'realizar:time_to_first_token_seconds_count{model_name="scripted"} 3.0',
        'realizar:e2e_request_latency_seconds_count{model_name="scripted"} 3.0',
        'realizar:request_decode_time_seconds_count{model_name="scripted"} 3.0',
    ):
        assert line in text, line
