"""`return_progress`: a stream tells how much of a long prompt has been read, in llama.cpp's form."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import httpx
import openai
import pytest

from server_thread import CONTEXT, RunningServer

URL, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def long_chat(words: str, **fields: Any) -> dict[str, Any]:
    """A chat of most of the context: several steps read its prompt."""
    content = words * (CONTEXT // 2 // len(words.split()))
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 3, "stream": True, **fields}


def chunks(http: httpx.Client, body: dict[str, Any], url: str = URL) -> list[dict[str, Any]]:
    lines = http.post(url, json=body).text.splitlines()
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


def long_prompt(words: str) -> str:
    return words * (CONTEXT // 2 // len(words.split()))


def test_completions_report_each_prompt(http: httpx.Client) -> None:
    prompts = [long_prompt("north south east "), long_prompt("spring summer autumn ")]
    body = {"prompt": prompts, "n": 2, "max_tokens": 3, "temperature": 0, "stream": True}
    got = chunks(http, {**body, "return_progress": True, "stream_options": {"include_usage": True}}, COMPLETIONS)
    usage = got.pop()["usage"]
    reported: dict[int, list[dict[str, Any]]] = {}
    for place, chunk in enumerate(got):
        (choice,) = chunk["choices"]
        if "prompt_progress" in chunk:
            assert (choice["text"], choice["finish_reason"]) == ("", None)
            assert not any(
                "prompt_progress" not in each and each["choices"][0]["index"] // 2 == choice["index"] // 2
                for each in got[:place]
            )  # all before the text
            reported.setdefault(choice["index"], []).append(chunk["prompt_progress"])
    assert sorted(reported) == [0, 2]
    assert sum(each[-1]["total"] for each in reported.values()) == usage["prompt_tokens"]
    for each in reported.values():
        assert each[-1]["processed"] == each[-1]["total"]
        assert [step["processed"] for step in each] == sorted({step["processed"] for step in each})

    def texts(found: list[dict[str, Any]]) -> list[str]:
        choices = [chunk["choices"][0] for chunk in found]
        return ["".join(choice["text"] for choice in choices if choice["index"] == at) for at in range(4)]

    without = chunks(http, body, COMPLETIONS)
    assert all("prompt_progress" not in chunk for chunk in without)
    assert texts(without) == texts(got)


def test_responses_report_in_their_events_of_progress(client: openai.OpenAI, server: RunningServer) -> None:
    def events(**body: Any) -> list[Any]:
        text = long_prompt("iron copper silver ")
        stream = client.responses.create(
            model=server.model.name, input=text, max_output_tokens=3, stream=True, temperature=0, extra_body=body
        )
        return list(stream)

    got = events(return_progress=True)
    assert [event.sequence_number for event in got] == list(range(len(got)))
    reported = [(event.type, event.model_extra["prompt_progress"]) for event in got if event.model_extra]
    assert {kind for kind, _ in reported} == {"response.in_progress"}
    assert len(reported) > 1
    total = got[-1].response.usage.input_tokens
    assert [read["total"] for _, read in reported] == [total] * len(reported)
    assert reported[-1][1]["processed"] == total
    without = events()
    # A delta may hold several tokens where the reader is slow, so runs of one kind count once.
    kinds, kinds_without = (
        [kind for kind, _ in groupby(e.type for e in each if not e.model_extra)] for each in (got, without)
    )
    assert kinds == kinds_without
    assert not any(event.model_extra for event in without)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (URL, {"messages": [{"role": "user", "content": "x"}]}),
        (COMPLETIONS, {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
    ],
)
def test_a_whole_answer_has_no_progress(http: httpx.Client, path: str, body: dict[str, Any]) -> None:
    for given in ({}, {"stream": False}):
        answer = http.post(path, json={**body, **given, "return_progress": True})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "return_progress"


def test_asking_for_no_progress_is_taken(http: httpx.Client) -> None:
    assert http.post(URL, json={**long_chat("x "), "stream": False, "return_progress": False}).status_code == 200
