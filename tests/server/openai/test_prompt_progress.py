"""`return_progress`: a stream tells how much of a long prompt has been read, in llama.cpp's form."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from server_thread import CONTEXT, RunningServer

URL = "/v1/chat/completions"


def long_chat(words: str, **fields: Any) -> dict[str, Any]:
    """A chat of most of the context: several steps read its prompt."""
    content = words * (CONTEXT // 2 // len(words.split()))
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 3, "stream": True, **fields}


def chunks(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = http.post(URL, json=body).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_every_step_that_reads_some_is_an_event_before_the_text(http: httpx.Client) -> None:
    body = long_chat("red blue green ", return_progress=True, stream_options={"include_usage": True})
    got = chunks(http, body)
    reported = [chunk["prompt_progress"] for chunk in got if "prompt_progress" in chunk]
    assert len(reported) > 1
    assert got[: len(reported)] == [chunk for chunk in got if "prompt_progress" in chunk]  # all before the text
    usage = got[-1]["usage"]
    assert {each["total"] for each in reported} == {usage["prompt_tokens"]}
    assert {each["cache"] for each in reported} == {usage["prompt_tokens_details"]["cached_tokens"]}
    read = [each["processed"] for each in reported]
    assert read == sorted(set(read))
    assert read[-1] == usage["prompt_tokens"]
    assert all(isinstance(each["time_ms"], int) for each in reported)
    roles = [chunk["choices"][0]["delta"].get("role") for chunk in got if chunk["choices"]]
    assert roles == ["assistant"] + [None] * (len(roles) - 1)


def test_a_cached_prompt_is_read_at_once(http: httpx.Client) -> None:
    body = long_chat("seven eight nine ", return_progress=True, max_tokens=1)
    chunks(http, body)
    (reported,) = [chunk["prompt_progress"] for chunk in chunks(http, body) if "prompt_progress" in chunk]
    assert reported["cache"] > reported["total"] // 2
    assert reported["processed"] == reported["total"]


def test_nobody_else_gets_these_events(http: httpx.Client, client: openai.OpenAI, server: RunningServer) -> None:
    assert all("prompt_progress" not in chunk for chunk in chunks(http, long_chat("one two three ")))
    messages: list[Any] = long_chat("four five six ")["messages"]
    stream = client.chat.completions.create(
        model=server.model.name, messages=messages, max_tokens=2, stream=True, extra_body={"return_progress": True}
    )
    progress = [(chunk.model_extra or {}).get("prompt_progress") for chunk in stream]
    assert len([each for each in progress if each is not None]) > 1


@pytest.mark.parametrize("n", [1, 3])
def test_the_text_is_that_of_a_request_without_it(http: httpx.Client, n: int) -> None:
    def texts(**fields: Any) -> list[str]:
        got = chunks(http, long_chat("a b c ", temperature=0, n=n, max_tokens=6, **fields))
        parts = [choice for chunk in got for choice in chunk["choices"]]
        return ["".join(part["delta"].get("content") or "" for part in parts if part["index"] == at) for at in range(n)]

    assert texts() == texts(return_progress=True)


def test_a_whole_answer_has_no_progress(http: httpx.Client) -> None:
    answer = http.post(URL, json=long_chat("x ", stream=False, return_progress=True))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "return_progress"
    assert http.post(URL, json={**long_chat("x "), "stream": False, "return_progress": False}).status_code == 200
