"""OpenAI's Agents SDK: tools, output types, handoffs and streams, over Responses and over chat."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import openai
import pydantic
import pytest

from clients.played_model import Turn, play
from server_thread import NAME, RunningServer
from waits import HANG_S

agents = pytest.importorskip("agents")


class Answer(pydantic.BaseModel):
    city: str
    celsius: int


@agents.function_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@agents.function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"21 C in {city}"


ANSWER = Answer(city="Paris", celsius=21)
SAID = Turn(ANSWER.model_dump_json())
BOTH = Turn("Both.", (("add", {"a": 2, "b": 3}), ("weather", {"city": "Paris"})), "I need two tools.")
RESULTS = Turn("They are {results}.")
MODELS = ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"]


def run(server: RunningServer, kind: str, work: Callable[[Any], Awaitable[Any]]) -> Any:
    """The result of some work with a model of the SDK."""

    async def with_client() -> Any:
        agents.set_tracing_disabled(True)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=HANG_S) as client:
            return await work(getattr(agents, kind)(model=NAME, openai_client=client))

    return asyncio.run(with_client())


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("last", "output"), [(RESULTS, "They are 5, 21 C in Paris."), (SAID, ANSWER)])
def test_tools(played: RunningServer, kind: str, streamed: bool, last: Turn, output: Any) -> None:
    async def work(model: Any) -> Any:
        agent = agents.Agent(
            name="guide", instructions="Answer.", tools=[add, weather], model=model,
            output_type=Answer if last is SAID else None,
        )  # fmt: skip
        if not streamed:
            return (await agents.Runner.run(agent, play(replace(BOTH, say=""), last))).final_output
        result = agents.Runner.run_streamed(agent, play(replace(BOTH, say=""), last))
        names = [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]
        assert names.count("tool_called") == names.count("tool_output") == 2
        return result.final_output

    assert run(played, kind, work) == output


@pytest.mark.parametrize("kind", MODELS)
def test_an_output_type_alone(played: RunningServer, kind: str) -> None:
    async def work(model: Any) -> Any:
        agent = agents.Agent(name="guide", output_type=Answer, model=model)
        return (await agents.Runner.run(agent, play(SAID))).final_output

    assert run(played, kind, work) == ANSWER


@pytest.mark.parametrize("kind", MODELS)
def test_a_handoff(played: RunningServer, kind: str) -> None:
    turns = [Turn(calls=(call,)) for call in (("transfer_to_meteorologist", {}), ("weather", {"city": "Paris"}))]

    async def work(model: Any) -> Any:
        second = agents.Agent(name="meteorologist", tools=[weather], model=model)
        first = agents.Agent(name="guide", handoffs=[second], model=model)
        result = await agents.Runner.run(first, play(*turns, Turn("Warm.")))
        return result.last_agent.name, result.final_output

    assert run(played, kind, work) == ("meteorologist", "Warm.")


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("choice", ["required", "add"])
def test_a_forced_tool_and_a_second_question(played: RunningServer, kind: str, choice: str) -> None:
    async def work(model: Any) -> Any:
        settings = agents.ModelSettings(tool_choice=choice, parallel_tool_calls=False)
        agent = agents.Agent(name="guide", tools=[add, weather], model=model, model_settings=settings)
        first = await agents.Runner.run(agent, play(Turn(calls=(("add", {"a": 2, "b": 3}),)), RESULTS))
        assert first.final_output == "They are 5."
        agent = agents.Agent(name="guide", tools=[add], model=model)
        question = {"role": "user", "content": play(Turn("Again."))}
        return (await agents.Runner.run(agent, [*first.to_input_list(), question])).final_output

    assert run(played, kind, work) == "Again."


@pytest.mark.parametrize("kind", MODELS)
def test_a_session_and_an_agent_as_a_tool(played: RunningServer, kind: str) -> None:
    async def work(model: Any) -> Any:
        helper = agents.Agent(name="helper", model=model)
        tool = helper.as_tool("helper", "Ask the helper.")
        agent = agents.Agent(name="guide", tools=[tool], model=model)
        inner = play(Turn("I helped."))
        session = agents.SQLiteSession("one")
        first = play(Turn(calls=(("helper", {"input": inner}),)), RESULTS)
        result = await agents.Runner.run(agent, first, session=session)
        assert result.final_output == "They are I helped.."
        return (await agents.Runner.run(agent, play(Turn("Still here.")), session=session)).final_output

    assert run(played, kind, work) == "Still here."
