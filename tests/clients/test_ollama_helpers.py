"""ollama's client: functions as tools, a schema beside them, thinking, streams and errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ollama
import pydantic
import pytest

from clients.played_model import Turn, play
from server_thread import NAME, RunningServer
from waits import HANG_S


class Answer(pydantic.BaseModel):
    city: str
    celsius: int


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one of them.
        b: the other.
    """
    return a + b


def weather(city: str) -> str:
    """The weather of a city."""
    return f"21 C in {city}"


TOOLS = {"add": add, "weather": weather}
ANSWER = Answer(city="Paris", celsius=21)
SAID = Turn(ANSWER.model_dump_json())
BOTH = Turn("Both.", (("add", {"a": 2, "b": 3}), ("weather", {"city": "Paris"})), "I need two tools.")
CALLS = replace(BOTH, say="")  # beside a schema no other text stands before calls


@pytest.fixture
def client(played: RunningServer) -> Iterator[ollama.Client]:
    with ollama.Client(host=played.url, timeout=HANG_S) as client:
        yield client


def ask(*turns: Turn) -> list[Any]:
    return [{"role": "user", "content": play(*turns)}]


def results_of(message: Any) -> list[Any]:
    return [
        {
            "role": "tool",
            "tool_name": call.function.name,
            "content": str(TOOLS[call.function.name](**call.function.arguments)),  # type: ignore[operator]
        }
        for call in message.tool_calls
    ]


@pytest.mark.parametrize("think", [None, True])
@pytest.mark.parametrize("schema", [None, Answer.model_json_schema()], ids=["free", "schema"])
def test_two_calls_and_an_answer(client: ollama.Client, think: bool | None, schema: Any) -> None:
    messages = ask(CALLS, SAID if schema else Turn("They are {results}."))
    options: Any = {"model": NAME, "tools": [add, weather], "think": think, "format": schema}
    first = client.chat(messages=messages, **options).message
    assert first.thinking == ("I need two tools." if think else first.thinking)
    assert [call.function.arguments for call in first.tool_calls or ()] == [{"a": 2, "b": 3}, {"city": "Paris"}]
    messages += [first, *results_of(first)]
    last = client.chat(messages=messages, **options).message
    if schema:
        assert Answer.model_validate_json(last.content or "") == ANSWER
    else:
        assert last.content == "They are 5, 21 C in Paris."


def test_a_stream_with_calls(client: ollama.Client) -> None:
    chunks = list(client.chat(model=NAME, messages=ask(BOTH), tools=[add, weather], think=True, stream=True))
    assert "".join(chunk.message.thinking or "" for chunk in chunks) == "I need two tools."
    assert "".join(chunk.message.content or "" for chunk in chunks) == "Both."
    calls = [call.function for chunk in chunks for call in chunk.message.tool_calls or ()]
    assert [call.name for call in calls] == ["add", "weather"]
    assert chunks[-1].done_reason == "stop"


def test_generate_with_a_schema(client: ollama.Client) -> None:
    given = client.generate(model=NAME, prompt=play(SAID), format=Answer.model_json_schema())
    assert Answer.model_validate_json(given.response) == ANSWER


def test_models_and_errors(client: ollama.Client) -> None:
    assert NAME in {(model.model or "").removesuffix(":latest") for model in client.list().models}
    assert "tools" in (client.show(NAME).capabilities or ())
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat(model="nobody", messages=ask(Turn("Hi.")))
    assert caught.value.status_code == 404
