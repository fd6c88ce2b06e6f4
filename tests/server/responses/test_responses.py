"""OpenAI's official client against a real server: whole and streamed responses, tools, formats, counts, refusals."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

MODEL = "org/smollm2"
ASK = "How is the weather in Rome?"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 10}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "strict": True,
}


def greedy(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_output_tokens": 24, "input": ASK, "temperature": 0, **fields}


def test_whole_and_streamed_are_the_same(client: openai.OpenAI) -> None:
    whole = client.responses.create(**greedy())
    assert whole.output_text
    assert (whole.status, whole.object, whole.error) == ("incomplete", "response", None)
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None
    assert whole.usage.output_tokens == 24
    events = list(client.responses.create(**greedy(stream=True)))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == whole.output_text
    assert len(texts) > 4
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text


def test_the_clients_stream_helper_completes(client: openai.OpenAI) -> None:
    fields = greedy(input="Say yes.", max_output_tokens=300)
    whole = client.responses.create(**fields)
    assert whole.status == "completed"
    with client.responses.stream(**fields) as stream:
        final = stream.until_done().get_final_response()
    assert final.output_text == whole.output_text


def test_an_answer_is_parsed_by_its_schema(client: openai.OpenAI) -> None:
    class Weather(pydantic.BaseModel):
        sunny: bool

    made = client.responses.parse(**greedy(text_format=Weather))
    assert isinstance(made.output_parsed, Weather)
    free = client.responses.create(**greedy(text={"format": {"type": "json_object"}}, max_output_tokens=100))
    assert free.output_text.startswith("{")


@pytest.mark.parametrize("streamed", [False, True])
def test_a_forced_call_keeps_its_schema_and_its_output_is_read(client: openai.OpenAI, *, streamed: bool) -> None:
    fields = greedy(tools=[WEATHER], tool_choice={"type": "function", "name": "weather"}, max_output_tokens=160)
    if streamed:
        with client.responses.stream(**fields) as stream:
            answer: Any = stream.get_final_response()
    else:
        answer = client.responses.create(**fields)
    (call,) = answer.output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert set(json.loads(call.arguments)) == {"city", "days"}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}
    given = call.model_dump(include={"type", "id", "call_id", "name", "arguments", "status"})
    later = [{"role": "user", "content": ASK}, given, output]
    assert client.responses.create(**greedy(input=later, tools=[WEATHER])).output


def test_counts_of_the_cache(client: openai.OpenAI) -> None:
    text = "A prompt that no other test of responses has. " * 20
    first, again = (client.responses.create(**greedy(input=text)).usage for _ in range(2))
    assert first is not None
    assert again is not None
    assert first.input_tokens == again.input_tokens
    assert first.input_tokens_details.cache_write_tokens > 0
    assert again.input_tokens_details.cached_tokens >= first.input_tokens_details.cache_write_tokens
    assert again.input_tokens - again.input_tokens_details.cached_tokens <= 16


def test_a_count_is_that_of_the_prompt(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "input": ASK, "instructions": "Be brief.", "tools": [WEATHER]}
    counted = client.responses.input_tokens.count(**fields)
    usage = client.responses.create(**fields, max_output_tokens=1).usage
    assert usage is not None
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", usage.input_tokens)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.input_tokens.count(model=MODEL, input=ASK, conversation="conv_1")
    assert refused.value.param == "conversation"


def test_logprobs_of_the_text(client: openai.OpenAI) -> None:
    fields = greedy(include=["message.output_text.logprobs"], top_logprobs=2)
    content: Any = client.responses.create(**fields).output[0].content[0]  # type: ignore[union-attr,index]
    assert len(content.logprobs) == 24
    assert "".join(each.token for each in content.logprobs) == content.text
    assert all(len(each.top_logprobs) == 2 and each.token == each.top_logprobs[0].token for each in content.logprobs)
    streamed = [
        each.token
        for event in client.responses.create(**fields, stream=True)
        if event.type == "response.output_text.delta"
        for each in event.logprobs
    ]
    assert streamed == [each.token for each in content.logprobs]


def test_errors_are_the_clients_own_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.responses.create(**greedy(model="gpt"))
    with pytest.raises(openai.BadRequestError, match="input") as caught:
        client.responses.create(**greedy(input="word " * 5_000))
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
