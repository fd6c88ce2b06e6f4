"""pydantic-ai: each kind of output beside tools, streams, and tries after a wrong answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pydantic
import pytest

from clients.played_model import Turn, play
from server_thread import NAME, RunningServer

pydantic_ai = pytest.importorskip("pydantic_ai")
openai_models = pytest.importorskip("pydantic_ai.models.openai")
openai_providers = pytest.importorskip("pydantic_ai.providers.openai")


class Answer(pydantic.BaseModel):
    city: str
    celsius: int


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def weather(city: str) -> str:
    """The weather of a city."""
    if city == "Atlantis":
        raise pydantic_ai.ModelRetry("There is no such city.")
    return f"21 C in {city}"


def price(amount: Decimal) -> str:
    """A price with its tax."""
    return str(amount * 2)


ANSWER = Answer(city="Paris", celsius=21)
SAID = Turn(ANSWER.model_dump_json())
CALLED = Turn(calls=(("final_result", ANSWER.model_dump()),))
BOTH = Turn("Both.", (("add", {"a": 2, "b": 3}), ("weather", {"city": "Paris"})), "I need two tools.")
KINDS = [openai_models.OpenAIChatModel, openai_models.OpenAIResponsesModel]
# Where a call is required or a schema holds, no other text stands before calls.
OUTPUTS = [
    ("NativeOutput", [replace(BOTH, say=""), SAID]),
    ("ToolOutput", [replace(BOTH, say=""), CALLED]),
    ("PromptedOutput", [replace(BOTH, say=""), SAID]),
]


def agent_of(server: RunningServer, kind: Any, output: Any = str, **options: Any) -> Any:
    model = kind(NAME, provider=openai_providers.OpenAIProvider(base_url=f"{server.url}/v1", api_key="none"))
    return pydantic_ai.Agent(model, output_type=output, tools=[add, weather, price], retries=1, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("output", "turns"), OUTPUTS)
def test_outputs_beside_tools(played: RunningServer, kind: Any, output: str, turns: list[Turn]) -> None:
    agent = agent_of(played, kind, getattr(pydantic_ai, output)(Answer))
    assert agent.run_sync(play(*turns)).output == ANSWER


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("output", "turns"), OUTPUTS)
def test_outputs_are_streamed(played: RunningServer, kind: Any, output: str, turns: list[Turn]) -> None:
    async def run() -> Any:
        agent = agent_of(played, kind, getattr(pydantic_ai, output)(Answer))
        async with agent.run_stream(play(*turns)) as result:
            return [given async for given in result.stream_output(debounce_by=None)][-1]

    assert asyncio.run(run()) == ANSWER


@pytest.mark.parametrize("kind", KINDS)
def test_text_after_two_tools(played: RunningServer, kind: Any) -> None:
    result = agent_of(played, kind).run_sync(play(BOTH, Turn("They are {results}.")))
    assert result.output == "They are 5, 21 C in Paris."
    again = agent_of(played, kind).run_sync(play(Turn("Again.")), message_history=result.all_messages())
    assert again.output == "Again."


@pytest.mark.parametrize("kind", KINDS)
def test_a_tool_that_asks_to_try_again(played: RunningServer, kind: Any) -> None:
    turns = (Turn(calls=(("weather", {"city": city}),)) for city in ("Atlantis", "Paris"))
    assert "21 C in Paris" in agent_of(played, kind).run_sync(play(*turns, Turn("{results}"))).output


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_that_is_tried_again(played: RunningServer, kind: Any) -> None:
    agent = agent_of(played, kind, pydantic_ai.ToolOutput(Answer))

    @agent.output_validator  # type: ignore[untyped-decorator]
    def warm(answer: Answer) -> Answer:
        if answer.celsius < 0:
            raise pydantic_ai.ModelRetry("Warmer.")
        return answer

    cold = Turn(calls=(("final_result", {"city": "Paris", "celsius": -3}),))
    assert agent.run_sync(play(cold, CALLED)).output == ANSWER


@pytest.mark.parametrize("kind", KINDS)
def test_a_forced_call_among_tools_with_decimals(played: RunningServer, kind: Any) -> None:
    """A schema of pydantic's `Decimal` has a look-ahead."""
    agent = agent_of(played, kind, Answer)  # its output is a tool, and one is required
    assert agent.run_sync(play(Turn(calls=(("price", {"amount": "2.50"}),)), CALLED)).output == ANSWER


@pytest.mark.parametrize("kind", KINDS)
def test_reasoning_is_seen(played: RunningServer, kind: Any) -> None:
    result = agent_of(played, kind).run_sync(play(Turn("Yes.", think="Hm.")))
    assert result.output == "Yes."
    parts = [part for message in result.all_messages() for part in message.parts if part.part_kind == "thinking"]
    texts = [part.content or part.provider_details["raw_content"][0] for part in parts]  # of Responses, no summary
    assert [text.strip() for text in texts] == ["Hm."]
