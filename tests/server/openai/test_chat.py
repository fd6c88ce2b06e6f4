"""Chat completions through the official client, on a real model: every field, streamed and whole."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import httpx
import openai
import pytest

from wider import wider

MODEL = "org/smollm2"
HELLO = [{"role": "user", "content": "Say hello."}]
STORY = [{"role": "user", "content": "Tell me a story about a fox."}]


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": MODEL, "messages": HELLO, "temperature": 0, "max_tokens": 24, **fields}
    )


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[list[str], list[Any]]:
    """Texts by choice, and the chunks."""
    chunks = list(chat(client, stream=True, **fields))
    texts: dict[int, str] = defaultdict(str)
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    return [texts[index] for index in sorted(texts)], chunks


def text_of(answer: Any) -> str:
    return answer.choices[0].message.content


FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seed": {"seed": 7, "temperature": 0.9},
    "n": {"n": 3, "seed": 1, "temperature": 1.0},
    "top_p": {"seed": 2, "temperature": 1.0, "top_p": 0.5},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 1.0},
    "stop": {"stop": [".", "!"]},
    "one stop": {"stop": " world"},
    "max_completion_tokens": {"max_completion_tokens": 5, "max_tokens": 20},
    "developer": {"messages": [{"role": "developer", "content": "You are a pirate."}, *HELLO]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Say hello."}]}]},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "json_object": {"response_format": {"type": "json_object"}, "max_tokens": 40},
    "extra samplers": {
        "seed": 3,
        "temperature": 1.0,
        "extra_body": {
            "top_k": 20,
            "min_p": 0.05,
            "typical_p": 0.95,
            "top_n_sigma": 2.0,
            "repetition_penalty": 1.1,
            "xtc_probability": 0.5,
            "xtc_threshold": 0.1,
            "dry_multiplier": 0.8,
            "dry_base": 1.5,
            "dry_allowed_length": 2,
            "dry_penalty_last_n": 64,
            "dry_sequence_breakers": ["\n", "."],
        },
    },
    "mirostat": {
        "seed": 3,
        "temperature": 1.0,
        "extra_body": {"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2},
    },
    "length": {"extra_body": {"ignore_eos": True, "min_tokens": 24}},
}


@pytest.mark.parametrize("name", wider(FIELDS, "greedy", "n", "one stop", "logprobs", "json_object"))
def test_deltas_concatenate_to_the_whole(client: openai.OpenAI, name: str) -> None:
    fields = FIELDS[name]
    whole = chat(client, **fields)
    texts, chunks = streamed(client, **fields)
    assert texts == [choice.message.content for choice in whole.choices]
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    firsts = {chunk.choices[0].index: chunk.choices[0] for chunk in reversed(chunks)}
    assert all(choice.delta.role == "assistant" for choice in firsts.values())
    ends = {chunk.choices[0].index: chunk.choices[0] for chunk in chunks if chunk.choices[0].finish_reason}
    assert [ends[index].finish_reason for index in sorted(ends)] == [each.finish_reason for each in whole.choices]
    for end in ends.values():
        assert end.delta.model_dump(exclude_unset=True) == {}


def test_the_greedy_answer_does_not_hang_on_its_neighbours(client: openai.OpenAI) -> None:
    alone = text_of(chat(client))
    assert text_of(chat(client, n=2)) == alone
    assert chat(client, n=2).choices[1].message.content == alone


def test_seeds(client: openai.OpenAI) -> None:
    hot = {"temperature": 1.2, "messages": STORY}
    assert text_of(chat(client, seed=5, **hot)) == text_of(chat(client, seed=5, **hot))
    assert text_of(chat(client, seed=5, **hot)) != text_of(chat(client, seed=6, **hot))
    assert len({text_of(chat(client, **hot)) for _ in range(3)}) > 1


def test_choices_differ_and_have_their_index(client: openai.OpenAI) -> None:
    answer = chat(client, n=4, temperature=1.2, seed=11, messages=STORY)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in answer.choices}) > 1


def test_max_tokens_and_usage(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=5)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5
    both = chat(client, max_tokens=5, max_completion_tokens=3)
    assert both.usage.completion_tokens == 3


def test_usage_of_a_stream(client: openai.OpenAI) -> None:
    _, chunks = streamed(client, n=2, stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    whole = chat(client, n=2)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, every = streamed(client, extra_body={"stream_options": options})
    assert every[0].usage.completion_tokens >= 1


def test_cached_prefix_shows_in_the_usage(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "Remember these words: " + "fox hen dog " * 40}]
    chat(client, messages=long, max_tokens=1)
    again = chat(client, messages=long, max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens >= 64
    salted = chat(client, messages=long, max_tokens=1, extra_body={"cache_salt": "mine"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_stop_strings_are_not_part_of_the_text(client: openai.OpenAI) -> None:
    whole = text_of(chat(client))
    word = whole.split()[2]
    answer = chat(client, stop=[word])
    assert answer.choices[0].finish_reason == "stop"
    assert text_of(answer) == whole[: whole.index(word)]
    assert answer.choices[0].model_extra["stop_reason"] == word


def test_stop_token_ids_and_logit_bias(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, extra_body={"return_tokens_as_token_ids": True})
    ids = [int(entry.token.removeprefix("token_id:")) for entry in answer.choices[0].logprobs.content]
    stopped = chat(client, extra_body={"stop_token_ids": [ids[3]]})
    assert stopped.usage.completion_tokens == ids.index(ids[3]) + 1
    banned = chat(
        client, logit_bias={str(ids[0]): -100}, logprobs=True, extra_body={"return_tokens_as_token_ids": True}
    )
    assert banned.choices[0].logprobs.content[0].token != f"token_id:{ids[0]}"
    forced = chat(
        client,
        logit_bias={str(ids[5]): 100},
        max_tokens=4,
        logprobs=True,
        extra_body={"return_tokens_as_token_ids": True},
    )
    assert {entry.token for entry in forced.choices[0].logprobs.content} == {f"token_id:{ids[5]}"}


def test_logprobs(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=4)
    entries = answer.choices[0].logprobs.content
    ends = answer.choices[0].finish_reason == "stop"  # with a token that is no text
    assert len(entries) == answer.usage.completion_tokens - ends
    for entry in entries:
        assert len(entry.top_logprobs) == 4
        assert entry.token == entry.top_logprobs[0].token  # greedy
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
        assert bytes(entry.bytes).decode() == entry.token
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == text_of(answer)
    _, chunks = streamed(client, logprobs=True, top_logprobs=4)
    parts = [
        entry for chunk in chunks for choice in chunk.choices if choice.logprobs for entry in choice.logprobs.content
    ]
    assert parts == entries
    assert all(not entry.top_logprobs for entry in chat(client, logprobs=True).choices[0].logprobs.content)


def test_prompt_logprobs(client: openai.OpenAI) -> None:
    answer = chat(client, max_tokens=1, extra_body={"prompt_logprobs": 2})
    listed = answer.model_extra["prompt_logprobs"]
    assert listed[0] is None
    assert len(listed) == answer.usage.prompt_tokens
    assert all(2 <= len(entry) <= 3 for entry in listed[1:])


def test_ignore_eos_and_min_tokens(client: openai.OpenAI) -> None:
    brief = [{"role": "user", "content": "Answer with the single word yes."}]
    free = chat(client, messages=brief, max_tokens=200)
    assert free.choices[0].finish_reason == "stop"
    count = free.usage.completion_tokens
    longer = chat(client, messages=brief, max_tokens=count + 5, extra_body={"min_tokens": count + 3})
    assert longer.usage.completion_tokens >= count + 3
    unending = chat(client, messages=brief, max_tokens=count + 9, extra_body={"ignore_eos": True})
    assert unending.usage.completion_tokens == count + 9


def test_history_with_tool_calls_and_other_roles(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
        {"role": "user", "content": "Thanks.", "name": "Ann"},
    ]
    assert chat(client, messages=messages).choices[0].message.content


def test_an_answer_can_be_sent_back_as_it_came(client: openai.OpenAI) -> None:
    answer = chat(client).choices[0].message
    again = chat(client, messages=[*HELLO, answer.model_dump(), {"role": "user", "content": "And now?"}])
    assert again.usage.prompt_tokens > 33


def test_fields_that_change_nothing_are_accepted(client: openai.OpenAI) -> None:
    plain = text_of(chat(client))
    answer = chat(
        client,
        user="me",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="s",
        modalities=["text"],
        verbosity="medium",
        reasoning_effort="medium",
        prediction={"type": "content", "content": "x"},
        parallel_tool_calls=True,
        extra_body={"best_of": 1, "use_beam_search": False, "skip_special_tokens": True, "length_penalty": 1.0},
    )
    assert text_of(answer) == plain
    nulls = ["audio", "functions", "function_call", "logit_bias", "max_completion_tokens", "n", "seed", "stop", "tools"]
    assert text_of(chat(client, extra_body=dict.fromkeys(nulls))) == plain


def test_other_names_of_the_model(client: openai.OpenAI) -> None:
    assert chat(client, model="other", max_tokens=1).model == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        chat(client, model="othr")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert "'other'" in str(caught.value)


def test_structured_outputs(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    person = json.loads(text_of(chat(client, response_format=form, max_tokens=60)))
    assert set(person) == {"name", "age"}
    assert isinstance(person["age"], int)
    assert isinstance(json.loads(text_of(chat(client, extra_body={"guided_json": schema}, max_tokens=60))), dict)
    assert text_of(chat(client, extra_body={"guided_choice": ["red", "green"]})) in ("red", "green")
    assert text_of(chat(client, extra_body={"structured_outputs": {"regex": "[0-9]{3}"}})).isdigit()
    assert text_of(chat(client, extra_body={"guided_grammar": 'start: "a" "b"'})) == "ab"


_LEAST = -(2**63)  # llguidance 1.9 crashes on it
_ROADS: dict[str, dict[str, Any]] = {
    "guided_json": {"extra_body": {"guided_json": {"const": _LEAST}}},
    "structured_outputs": {"extra_body": {"structured_outputs": {"json": {"enum": [0, _LEAST]}}}},
    "guided_grammar": {"extra_body": {"guided_grammar": 'start: "a" %json ' + json.dumps({"const": _LEAST})}},
    "response_format": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "a",
                "schema": {"type": "object", "properties": {"a": {"const": _LEAST}}, "required": ["a"]},
            },
        }
    },
    "tools": {
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "strict": True,
                    "parameters": {"type": "object", "properties": {"a": {"const": _LEAST}}, "required": ["a"]},
                },
            }
        ],
        "tool_choice": "required",
    },
}


@pytest.mark.parametrize("road", _ROADS)
def test_a_schema_that_crashes_its_compiler_is_the_clients_fault(client: openai.OpenAI, road: str) -> None:
    """The compiler's crash costs other requests nothing."""
    with pytest.raises(openai.BadRequestError, match="can't be honoured") as caught:
        chat(client, **_ROADS[road])
    assert caught.value.param is not None
    assert caught.value.param.startswith(road)
    assert text_of(chat(client, extra_body={"guided_choice": ["red"]})) == "red"


def test_the_first_byte_of_a_stream_and_its_end(http: httpx.Client) -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 3, "temperature": 0, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["x-request-id"]
        data = b"".join(response.iter_raw())
    events = data.decode().split("\n\n")
    assert events[-1] == ""
    assert events[-2] == "data: [DONE]"
    assert all(event.startswith("data: {") for event in events[:-2])


def test_an_answer_is_continued(client: openai.OpenAI) -> None:
    """What was said before the break and after it is what is said without one."""
    whole = text_of(chat(client, messages=STORY, max_tokens=24))
    begun = text_of(chat(client, messages=STORY, max_tokens=10))
    said = [*STORY, {"role": "assistant", "content": begun}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    rest = chat(client, messages=said, max_tokens=14, extra_body=fields)
    assert begun + text_of(rest) == whole
    assert rest.usage.prompt_tokens == chat(client, messages=STORY, max_tokens=1).usage.prompt_tokens + 10
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    for wrong in (STORY, [*STORY, {"role": "assistant", "content": ""}], [*STORY, {**said[-1], "tool_calls": calls}]):
        with pytest.raises(openai.BadRequestError, match="continue_final_message needs a last message"):
            chat(client, messages=wrong, extra_body=fields)
    with pytest.raises(openai.BadRequestError, match="needs add_generation_prompt to be false"):
        chat(client, messages=said, extra_body={**fields, "add_generation_prompt": True})
