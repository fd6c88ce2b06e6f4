"""anthropic's helpers: its tool runners, streams, `parse`, counts and retries."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import pydantic
import pytest
from anthropic import beta_async_tool, beta_tool

from clients.played_model import Turn, play
from realizar.errors import QueueFullError
from server_thread import NAME, RunningServer
from waits import HANG_S


class Answer(pydantic.BaseModel):
    city: str
    celsius: int


@beta_tool
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: one of them.
        b: the other.
    """
    return str(a + b)


@beta_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"21 C in {city}"


@beta_async_tool
async def later(city: str) -> str:
    """The weather of a city, tomorrow."""
    return f"22 C in {city}"


ANSWER = Answer(city="Paris", celsius=21)
SAID = Turn(ANSWER.model_dump_json())
BOTH = Turn("Both.", (("add", {"a": 2, "b": 3}), ("weather", {"city": "Paris"})), "I need two tools.")
CALLS = replace(BOTH, say="")  # beside a schema no other text stands before calls
RESULTS = Turn("They are {results}.")


@pytest.fixture
def client(played: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=played.url, api_key="none", timeout=HANG_S) as client:
        yield client


def ask(*turns: Turn) -> dict[str, Any]:
    return {"model": NAME, "max_tokens": 2000, "messages": [{"role": "user", "content": play(*turns)}]}


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


@pytest.mark.parametrize("thinking", [{}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}])
def test_tool_runner(client: anthropic.Anthropic, thinking: dict[str, Any]) -> None:
    runner = client.beta.messages.tool_runner(
        tools=[add, weather], **ask(BOTH, Turn(calls=(("add", {"a": 5, "b": 6}),)), RESULTS), **thinking
    )
    messages = list(runner)
    assert [message.stop_reason for message in messages] == ["tool_use", "tool_use", "end_turn"]
    assert text_of(messages[-1]) == "They are 5, 21 C in Paris, 11."


def test_tool_runner_streams(client: anthropic.Anthropic) -> None:
    texts = []
    for stream in client.beta.messages.tool_runner(tools=[add, weather], stream=True, **ask(BOTH, RESULTS)):
        texts += [event.delta.text for event in stream if getattr(getattr(event, "delta", None), "text", None)]
    assert "".join(texts) == "Both.They are 5, 21 C in Paris."


def test_asynchronous_tool_runner(played: RunningServer) -> None:
    async def run() -> Any:
        async with anthropic.AsyncAnthropic(base_url=played.url, api_key="none", timeout=HANG_S) as client:
            turns = Turn(calls=(("later", {"city": "Rome"}),)), RESULTS
            return await client.beta.messages.tool_runner(tools=[later], **ask(*turns)).until_done()

    assert text_of(asyncio.run(run())) == "They are 22 C in Rome."


@pytest.mark.parametrize("beta", [False, True])
def test_parse_with_a_schema(client: anthropic.Anthropic, beta: bool) -> None:
    messages = client.beta.messages if beta else client.messages
    assert messages.parse(output_format=Answer, **ask(SAID)).parsed_output == ANSWER


def test_parse_with_tools_and_a_schema(client: anthropic.Anthropic) -> None:
    runner = client.beta.messages.tool_runner(tools=[add, weather], output_format=Answer, **ask(CALLS, SAID))
    assert runner.until_done().parsed_output == ANSWER


@pytest.mark.parametrize("beta", [False, True])
def test_stream(client: anthropic.Anthropic, beta: bool) -> None:
    messages = client.beta.messages if beta else client.messages
    tools: Any = [add.to_dict(), weather.to_dict()]
    with messages.stream(tools=tools, **ask(BOTH)) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_message()
    assert {"text", "input_json", "content_block_stop", "message_stop"} <= kinds
    calls = [block for block in message.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [{"a": 2, "b": 3}, {"city": "Paris"}]
    assert message.stop_reason == "tool_use"
    with messages.stream(**ask(Turn("Word by word."))) as stream:
        assert "".join(stream.text_stream) == "Word by word."


def test_stream_with_a_schema(client: anthropic.Anthropic) -> None:
    with client.messages.stream(output_format=Answer, **ask(SAID)) as stream:
        assert stream.get_final_message().parsed_output == ANSWER


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_forced_calls(client: anthropic.Anthropic, choice: Any) -> None:
    tools: Any = [add.to_dict(), weather.to_dict()]
    message = client.messages.create(tools=tools, tool_choice=choice, **ask(Turn(calls=(("add", {"a": 2, "b": 3}),))))
    assert [block.input for block in message.content if block.type == "tool_use"] == [{"a": 2, "b": 3}]


def test_count_tokens(client: anthropic.Anthropic) -> None:
    asked = ask(Turn("Counted."))
    del asked["max_tokens"]
    counted = client.messages.count_tokens(**asked).input_tokens
    usage = client.messages.create(max_tokens=5, **asked).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert client.beta.messages.count_tokens(tools=[add.to_dict()], **asked).input_tokens > counted


def test_the_client_tries_again(played: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, refusals = played.engine.generate, [QueueFullError("the queue is full", 0.01)]

    async def refused(*args: Any, **options: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return await generate(*args, **options)

    monkeypatch.setattr(played.engine, "generate", refused)
    with anthropic.Anthropic(base_url=played.url, api_key="none", max_retries=1) as client:
        raw = client.messages.with_raw_response.create(**ask(Turn("At last.")))
    assert raw.retries_taken == 1
    assert text_of(raw.parse()) == "At last."


def test_errors_have_the_clients_classes(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="nobody"):
        client.messages.create(**(ask(Turn("Hi.")) | {"model": "nobody"}))
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**ask(Turn("x" * (256 << 10))))
    assert [model.id for model in client.models.list()] == [NAME, "other"]
