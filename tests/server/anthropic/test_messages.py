"""Anthropic's official client against a real server: whole and streamed answers, tools, counts, refusals, the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from server_thread import RunningServer
from waits import HANG_S

MODEL = "org/smollm2"
ASK = [{"role": "user", "content": "How is the weather in Rome?"}]
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 10}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    made = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=HANG_S)
    with made as client:
        yield client


def greedy(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 24, "messages": ASK, "extra_body": {"temperature": 0}, **fields}


def test_whole_and_streamed_are_the_same(client: Any) -> None:
    whole = client.messages.create(**greedy())
    assert whole.content[0].text
    assert (whole.stop_reason, whole.role, whole.type) == ("max_tokens", "assistant", "message")
    assert whole.usage.output_tokens == 24
    with client.messages.stream(**greedy()) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == final.content[0].text == whole.content[0].text
    assert final.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 24


def test_a_stop_sequence_is_named(client: Any) -> None:
    whole = client.messages.create(**greedy())
    word = whole.content[0].text.split()[3]
    stopped = client.messages.create(**greedy(stop_sequences=[word]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert word not in stopped.content[0].text


@pytest.mark.parametrize("streamed", [False, True])
def test_a_forced_call_keeps_its_schema_and_its_result_is_read(client: Any, *, streamed: bool) -> None:
    fields = greedy(tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"}, max_tokens=160)
    if streamed:
        with client.messages.stream(**fields) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(**fields)
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert call.name == "weather"
    assert set(call.input) == {"city", "days"}
    assert answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny"}
    blocks = [block.model_dump(include={"type", "id", "name", "input"}) for block in answer.content]
    later = [*ASK, {"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
    assert client.messages.create(**greedy(messages=later, tools=[WEATHER])).content


def test_counts_of_the_prompt_and_of_the_cache(client: Any) -> None:
    text = "A prompt that no other test has. " * 20
    messages = [{"role": "user", "content": text}]
    count = client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
    asks = greedy(messages=messages, cache_control={"type": "ephemeral"})
    first = client.messages.create(**asks).usage
    again = client.messages.create(**asks).usage
    for usage in (first, again):
        assert usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens == count
    assert first.cache_creation_input_tokens > 0
    assert again.cache_read_input_tokens >= first.cache_creation_input_tokens > 0
    assert again.cache_creation_input_tokens <= 16


def test_errors_are_the_clients_own_classes(client: Any, server: RunningServer) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**greedy(model="claude"))
    with pytest.raises(anthropic.BadRequestError, match="messages") as caught:
        client.messages.create(**greedy(messages=[{"role": "user", "content": "word " * 5_000}]))
    assert caught.value.request_id.startswith("req-")
    image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    with pytest.raises(anthropic.BadRequestError, match="text only"):
        client.messages.create(**greedy(messages=[{"role": "user", "content": [image]}]))


def test_a_last_message_of_the_assistants_is_continued(client: Any) -> None:
    """What was said before the break and after it is what is said without one."""
    whole = client.messages.create(**greedy()).content[0].text
    begun = client.messages.create(**greedy(max_tokens=10))
    for content in (begun.content[0].text, begun.content):
        said = [*ASK, {"role": "assistant", "content": content}]
        rest = client.messages.create(**greedy(messages=said, max_tokens=14))
        assert begun.content[0].text + rest.content[0].text == whole
    counted = client.messages.count_tokens(model=MODEL, messages=said)
    assert counted.input_tokens == client.messages.count_tokens(model=MODEL, messages=ASK).input_tokens + 10
