"""LangChain's chat models: bound tools, structured output by each method, streams, both of OpenAI's APIs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pydantic
import pytest

from clients.played_model import Turn, play
from server_thread import NAME, RunningServer
from waits import HANG_S

pytest.importorskip("langchain_openai")
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


class Answer(pydantic.BaseModel):
    """How warm a city is."""

    city: str
    celsius: int


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"21 C in {city}"


ONLY_THERE = "`make clients` alone installs it"
TOOLS: dict[str, Any] = {"add": add, "weather": weather}
ANSWER = Answer(city="Paris", celsius=21)
SAID = Turn(ANSWER.model_dump_json())
CALLED = Turn(calls=(("Answer", ANSWER.model_dump()),))
BOTH = Turn("Both.", (("add", {"a": 2, "b": 3}), ("weather", {"city": "Paris"})))
RESULTS = Turn("They are {results}.")


def openai_chat(server: RunningServer, **options: Any) -> Any:
    return ChatOpenAI(model=NAME, base_url=f"{server.url}/v1", api_key="none", timeout=HANG_S, **options)


def openai_responses(server: RunningServer, **options: Any) -> Any:
    return openai_chat(server, use_responses_api=True, **options)


def anthropic_chat(server: RunningServer) -> Any:
    module = pytest.importorskip("langchain_anthropic", reason=ONLY_THERE)
    return module.ChatAnthropic(model=NAME, base_url=server.url, api_key="none", max_tokens=500)


def ollama_chat(server: RunningServer) -> Any:
    module = pytest.importorskip("langchain_ollama", reason=ONLY_THERE)
    return module.ChatOllama(model=NAME, base_url=server.url)


def results_of(message: Any) -> list[Any]:
    return [
        ToolMessage(str(TOOLS[call["name"]].invoke(call["args"])), tool_call_id=call["id"])
        for call in message.tool_calls
    ]


ALL = [openai_chat, openai_responses, anthropic_chat, ollama_chat]


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("streamed", [False, True])
def test_bound_tools(played: RunningServer, make: Any, streamed: bool) -> None:
    model = make(played).bind_tools([add, weather])
    messages: list[Any] = [HumanMessage(play(BOTH, RESULTS))]
    for _ in range(2):
        if streamed:
            chunks = iter(model.stream(messages))
            message = next(chunks)
            for chunk in chunks:
                message += chunk
        else:
            message = model.invoke(messages)
        messages.append(message)
        messages += results_of(message)
    assert [type(message).__name__.removesuffix("Chunk") for message in messages] == [
        *("HumanMessage", "AIMessage", "ToolMessage", "ToolMessage", "AIMessage")
    ]
    assert str(messages[-1].text) == "They are 5, 21 C in Paris."


@pytest.mark.parametrize("make", [openai_chat, openai_responses])
@pytest.mark.parametrize(
    ("method", "turn", "strict"),
    [
        ("json_schema", SAID, None),
        ("json_schema", SAID, True),
        ("function_calling", CALLED, None),
        ("function_calling", CALLED, True),
        ("json_mode", SAID, None),
    ],
)
def test_structured_output(played: RunningServer, make: Any, method: str, turn: Turn, strict: bool | None) -> None:
    options = {} if strict is None else {"strict": strict}
    model = make(played).with_structured_output(Answer, method=method, include_raw=True, **options)
    given = model.invoke(f"As JSON. {play(turn)}")
    assert given["parsing_error"] is None
    assert given["parsed"] == ANSWER


@pytest.mark.parametrize(("make", "turn"), [(anthropic_chat, CALLED), (ollama_chat, SAID)])
def test_structured_output_of_others(played: RunningServer, make: Any, turn: Turn) -> None:
    assert make(played).with_structured_output(Answer).invoke(play(turn)) == ANSWER


@pytest.mark.parametrize("make", [openai_chat, openai_responses])
def test_structured_output_is_streamed(played: RunningServer, make: Any) -> None:
    assert list(make(played).with_structured_output(Answer).stream(play(SAID)))[-1] == ANSWER


@pytest.mark.parametrize("make", [openai_chat, openai_responses])
def test_tools_beside_a_schema(played: RunningServer, make: Any) -> None:
    model = make(played).bind_tools([add, weather], response_format=Answer, strict=True)
    messages: list[Any] = [HumanMessage(play(replace(BOTH, say=""), SAID))]
    first = model.invoke(messages)
    results = results_of(first)
    assert len(results) == 2
    last = model.invoke([*messages, first, *results])
    assert last.additional_kwargs["parsed"] == ANSWER
