"""A call that an answer quotes in ordinary tokens is text in every dialect, where marks are tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import httpx
import pytest

from realizar.engine.frontend.async_stream import AsyncStream
from realizar.engine.frontend.growing_choice import GrowingChoice
from realizar.engine.frontend.outputs import CompletionOutput, RequestOutput, Timings
from realizar.sampling_params import SamplingParams
from realizar.server.app import create_app
from realizar.server.settings import ServerSettings
from realizar.tokenizer.stop_checker import StopChecker
from realizar.tokenizer.templates.chat_template import ChatTemplate
from server.scripted_engine import ByteTokenizer, ScriptedEngine, scripted_model

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = "{{ tools | tojson }}<tool_call>{% for m in messages %}{{ m.content }}{% endfor %}<think>"
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
THOUGHT, CONTENT = "It splits on </think>.", f"Write {CALL}."
FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"type": "object", "properties": {}}}
HI = [{"role": "user", "content": "Hi"}]


class MarkTokenizer(ByteTokenizer):
    """A token per byte, and one for each mark."""

    vocab_size = 256 + len(MARKS)

    def token_text(self, index: int) -> str:
        return MARKS[index - 256] if index >= 256 else super().token_text(index)

    def token_bytes(self, index: int) -> bytes:
        return MARKS[index - 256].encode() if index >= 256 else super().token_bytes(index)

    def _encode(
        self, text: str, add_special: bool, parse_special: bool, restore: Mapping[int, str] | None = None
    ) -> list[int]:
        return (
            [256 + MARKS.index(text)] if text in MARKS else super()._encode(text, add_special, parse_special, restore)
        )


@dataclass
class TokenEngine(ScriptedEngine):
    """Generates these tokens, a few at a time."""

    ids: tuple[int, ...] = ()

    def _play(self, stream: AsyncStream, prompt: tuple[int, ...], sampling: SamplingParams) -> None:
        choice = GrowingChoice(
            stream.request_id, 0, StopChecker(MarkTokenizer(None), sampling), pytest.fail, stream.note
        )
        for start in range(0, len(self.ids), 5):
            choice.token_ids.extend(self.ids[start : start + 5])
            choice.note()
        choice.end("stop", None)
        choice.note()
        whole = CompletionOutput(0, "", self.ids, "stop")
        stream.end(RequestOutput(stream.request_id, None, prompt, (whole,), Timings(0.0, 0.1, 0.2, 0.3)))


DIALECTS: dict[str, tuple[str, dict[str, Any], Callable[[Any], str]]] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": HI, "tools": [{"type": "function", "function": FUNCTION}]},
        lambda answer: answer["choices"][0]["message"]["content"],
    ),
    "responses": (
        "/v1/responses",
        {"input": "Hi", "tools": [{"type": "function", **FUNCTION}]},
        lambda answer: answer["output"][-1]["content"][0]["text"],
    ),
    "messages": (
        "/v1/messages",
        {"messages": HI, "max_tokens": 500, "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}]},
        lambda answer: answer["content"][-1]["text"],
    ),
    "ollama": (
        "/api/chat",
        {"messages": HI, "stream": False, "tools": [{"type": "function", "function": FUNCTION}]},
        lambda answer: answer["message"]["content"],
    ),
}


def ask(path: str, body: dict[str, Any]) -> str:
    ids = (*THOUGHT.encode(), 257, *b"\n\n", *CONTENT.encode())
    tokenizer = MarkTokenizer(TEMPLATE)
    model = replace(scripted_model(), tokenizer=tokenizer, template=ChatTemplate(tokenizer))
    app = create_app(cast("Any", TokenEngine(ids=ids)), model, ServerSettings())

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post(path, json={"model": "scripted", **body})

    answer = asyncio.run(main())
    assert answer.status_code == 200, answer.text
    return answer.text


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_quoted_call_is_text(dialect: str) -> None:
    path, body, content_of = DIALECTS[dialect]
    assert content_of(json.loads(ask(path, body))) == CONTENT


@pytest.mark.parametrize("counted", [False, True], ids=["", "counted"])
def test_a_quoted_call_is_text_in_a_stream(counted: bool) -> None:
    path, body, _ = DIALECTS["chat"]
    events = ask(path, {**body, "stream": True, "stream_options": {"include_usage": counted}}).split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == CONTENT
    assert "".join(delta.get("reasoning_content") or delta.get("reasoning") or "" for delta in deltas) == THOUGHT
    assert not any(delta.get("tool_calls") for delta in deltas)
