"""What vLLM's clients send and read beside OpenAI's fields."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import httpx
import pytest

from realizar.server.app import create_app
from realizar.server.settings import ServerSettings
from server.scripted_engine import events_of, scripted_model
from server.stepwise_engine import StepwiseEngine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = {"role": "user", "content": "Hi"}
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": [HI], "n": 2}, COMPLETIONS: {"prompt": ["Hi", "Ho"], "n": 2}}
ANSWER = "Hm\u00e9.</think>Yes\U0001f600."
IDS = [*ANSWER.encode(), 0]


def ask(path: str, body: dict[str, Any], step: int = 1) -> tuple[httpx.Response, StepwiseEngine]:
    engine = StepwiseEngine(answer=ANSWER, step=step)
    template = (
        "<think>{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:<think>{% endif %}"
    )
    app = create_app(cast("Any", engine), scripted_model(template), ServerSettings())

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post(path, json=body)

    answer = asyncio.run(main())
    assert answer.status_code == 200, answer.text
    return answer, engine


def chunks_of(answer: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(event) for event in events_of(answer.text) if event != "[DONE]"]


@pytest.mark.parametrize("path", BODIES)
def test_ids_of_the_prompt_and_of_each_choice(path: str) -> None:
    body = {**BODIES[path], "max_tokens": 99, "return_token_ids": True}
    answer, engine = ask(path, body)
    prompts = [list(prompt) for prompt, *_ in engine.asked]
    whole = answer.json()
    assert [choice["token_ids"] for choice in whole["choices"]] == [IDS] * len(whole["choices"])
    if path == CHAT:
        assert whole["prompt_token_ids"] == prompts[0]
    else:
        assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [prompts[0]] * 2 + [prompts[1]] * 2


@pytest.mark.parametrize("include_reasoning", [True, False])
@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("path", BODIES)
def test_a_stream_has_each_id_once(path: str, step: int, *, include_reasoning: bool) -> None:
    shown = {} if path == COMPLETIONS else {"include_reasoning": include_reasoning}
    answer, engine = ask(
        path, {**BODIES[path], **shown, "max_tokens": 99, "return_token_ids": True, "stream": True}, step
    )
    chunks = chunks_of(answer)
    ids: dict[int, list[int]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            ids.setdefault(choice["index"], []).extend(choice.get("token_ids", ()))
    assert list(ids.values()) == [IDS] * len(ids)
    holders = chunks if path == CHAT else [choice for chunk in chunks for choice in chunk["choices"]]
    prompts = [each["prompt_token_ids"] for each in holders if "prompt_token_ids" in each]
    assert "prompt_token_ids" in holders[0]
    assert sorted(prompts) == sorted(
        list(prompt) for prompt, *_ in engine.asked for _ in range(1 if path == CHAT else 2)
    )


@pytest.mark.parametrize("path", BODIES)
def test_what_was_not_asked_for_is_null(path: str) -> None:
    whole = ask(path, {**BODIES[path], "max_tokens": 9})[0].json()
    holders = [whole] if path == CHAT else whole["choices"]
    assert all(holder["prompt_logprobs"] is None for holder in holders)
    assert "token_ids" not in whole["choices"][0]
    assert ask("/tokenize", {"prompt": "Hi"})[0].json()["token_strs"] is None


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"continuous_usage_stats": True}, False),
        ({"continuous_usage_stats": True, "include_usage": False}, False),
        ({"continuous_usage_stats": True, "include_usage": True}, True),
    ],
)
@pytest.mark.parametrize("path", BODIES)
def test_usage_in_every_chunk_needs_include_usage(path: str, options: dict[str, bool], *, counts: bool) -> None:
    body = {**BODIES[path], "max_tokens": 9, "stream": True, "stream_options": options}
    assert {bool(chunk.get("usage")) for chunk in chunks_of(ask(path, body)[0])} == {counts}


def test_a_last_message_that_goes_on_is_tokenized() -> None:
    body: dict[str, Any] = {"messages": [HI, {"role": "assistant", "content": "Ye"}]}
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    text = bytes(ask("/tokenize", {**body, **fields})[0].json()["tokens"]).decode()
    assert text.endswith("assistant: Ye")
    prompt = ask(CHAT, {**body, **fields, "max_tokens": 9})[1].asked[0][0]
    assert bytes(prompt).decode() == text
