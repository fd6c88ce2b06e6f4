"""Completions through the official client: prompts of all kinds, echo, log-probabilities, batches."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import httpx
import openai
import pytest

from server_thread import RunningServer

MODEL = "org/smollm2"
PROMPT = "The capital of France is"


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **fields: Any) -> Any:
    return client.completions.create(**{"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 8, **fields})


FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "batch": {"prompt": [PROMPT, "Once upon a time", "One, two,"], "n": 2, "seed": 4, "temperature": 1.0},
    "echo": {"echo": True},
    "echo with logprobs": {"echo": True, "logprobs": 2},
    "echo alone": {"echo": True, "logprobs": 1, "max_tokens": 0},
    "logprobs": {"logprobs": 3, "prompt": ["Zwei Grüße 🙂 und", PROMPT]},
    "stop": {"stop": [","], "max_tokens": 16},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS.keys())
def test_deltas_concatenate_to_the_whole(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    whole = complete(client, **fields)
    texts: dict[int, str] = defaultdict(str)
    lists: dict[int, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    ends: dict[int, str] = {}
    for chunk in complete(client, stream=True, **fields):
        assert chunk.object == "text_completion"
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
            if choice.logprobs:
                for name, values in choice.logprobs.model_dump().items():
                    lists[choice.index][name] += values
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert ends[choice.index] == choice.finish_reason
        if choice.logprobs:
            assert lists[choice.index] == choice.logprobs.model_dump()


def test_a_known_fact(client: openai.OpenAI) -> None:
    assert complete(client).choices[0].text.startswith(" Paris")


def test_token_ids_are_the_text(client: openai.OpenAI, server: RunningServer) -> None:
    ids = server.model.tokenizer.encode(PROMPT)
    assert complete(client, ids).choices[0].text == complete(client).choices[0].text
    both = complete(client, [ids, server.model.tokenizer.encode("Once upon a")])
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].text == complete(client).choices[0].text
    assert complete(client, ids, echo=True, max_tokens=0).choices[0].text == PROMPT


def test_a_batch_is_its_prompts_alone(client: openai.OpenAI) -> None:
    prompts = [f"Number {number} is" for number in range(20)]  # more than run at once
    together = complete(client, prompts, max_tokens=3)
    assert [choice.index for choice in together.choices] == list(range(20))
    for number in (0, 7, 19):
        assert together.choices[number].text == complete(client, prompts[number], max_tokens=3).choices[0].text
    assert together.usage.completion_tokens == 60


def test_echoed_logprobs(client: openai.OpenAI, server: RunningServer) -> None:
    ids = server.model.tokenizer.encode(PROMPT)
    choice = complete(client, ids, echo=True, logprobs=1, max_tokens=1).choices[0]
    listed = choice.logprobs
    assert len(listed.tokens) == len(listed.token_logprobs) == len(listed.top_logprobs) == len(ids) + 1
    assert listed.token_logprobs[0] is None
    assert listed.top_logprobs[0] is None
    assert "".join(listed.tokens) == choice.text
    for start, token in zip(listed.text_offset, listed.tokens, strict=True):
        assert choice.text[start:].startswith(token)
    for token, logprob, top in zip(listed.tokens[1:], listed.token_logprobs[1:], listed.top_logprobs[1:], strict=True):
        assert top[token] == logprob <= 0
        assert 1 <= len(top) <= 2
    # the last one is greedy, so it is the top one, exactly
    assert listed.token_logprobs[-1] == max(listed.top_logprobs[-1].values())


def test_echoed_logprobs_are_those_of_generating(client: openai.OpenAI, server: RunningServer) -> None:
    ids = server.model.tokenizer.encode(PROMPT)
    made = complete(client, ids, logprobs=1, max_tokens=6, extra_body={"return_tokens_as_token_ids": True}).choices[0]
    new = [int(token.removeprefix("token_id:")) for token in made.logprobs.tokens]
    scored = complete(client, [*ids, *new], echo=True, logprobs=1, max_tokens=0).choices[0]
    assert scored.logprobs.token_logprobs[len(ids) :] == pytest.approx(made.logprobs.token_logprobs, abs=1e-5)
    assert scored.finish_reason == "length"


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_prompt_does_not_find_itself_in_the_cache(http: httpx.Client, stream: bool) -> None:
    """A streamed echo with log-probabilities reads its prompt, and then goes on from there."""
    start = 2000 if stream else 3000
    body: dict[str, Any] = {"prompt": list(range(start, start + 40)), "echo": True, "logprobs": 0, "max_tokens": 1}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    text = http.post("/v1/completions", json=body).text
    usage = json.loads(text.split("\n\n")[-3].removeprefix("data: ") if stream else text)["usage"]
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]) == (40, {"cached_tokens": 0})
    plain = http.post("/v1/completions", json={"prompt": body["prompt"], "max_tokens": 1}).json()
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32


def test_prompt_logprobs(client: openai.OpenAI) -> None:
    choice = complete(client, extra_body={"prompt_logprobs": 1}).choices[0]
    listed = choice.model_extra["prompt_logprobs"]
    assert listed[0] is None
    for entry in listed[1:]:
        assert sorted(value["rank"] for value in entry.values())[0] == 1
        assert all(set(value) == {"logprob", "rank", "decoded_token"} for value in entry.values())


def test_sixteen_tokens_unless_asked(client: openai.OpenAI) -> None:
    fields = {"extra_body": {"ignore_eos": True}}
    answer = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, **fields)
    assert answer.usage.completion_tokens == 16


def test_cutting_only_when_asked(client: openai.OpenAI) -> None:
    answer = complete(client, "x" + " x" * 60 + " " + PROMPT, extra_body={"truncate_prompt_tokens": 5})
    assert answer.usage.prompt_tokens == 5
    assert answer.choices[0].text == complete(client, " " + PROMPT).choices[0].text


def test_the_context_exactly_full(client: openai.OpenAI, http: httpx.Client) -> None:
    size = 1024
    answer = complete(client, [1000] * (size - 2), max_tokens=2, extra_body={"ignore_eos": True})
    assert (answer.usage.total_tokens, answer.choices[0].finish_reason) == (size, "length")
    for prompt, count in (([1000] * (size - 2), 3), ([1000] * (size + 1), 1)):
        with pytest.raises(openai.BadRequestError) as caught:
            complete(client, prompt, max_tokens=count)
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "prompt"
        assert str(len(prompt)) in caught.value.message
        assert str(size) in caught.value.message
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "long " * 2000}]}
    error = http.post("/v1/chat/completions", json=chat).json()["error"]
    assert (error["code"], error["param"], error["type"]) == (
        "context_length_exceeded",
        "messages",
        "invalid_request_error",
    )
    assert "1024" in error["message"]
    streamed = http.post("/v1/chat/completions", json={**chat, "stream": True})
    assert (streamed.status_code, streamed.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_null_prompt_starts_from_nothing(client: openai.OpenAI) -> None:
    assert complete(client, None).usage.prompt_tokens == 1
