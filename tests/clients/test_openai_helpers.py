"""openai's helpers, over several turns and several calls in one answer, on both APIs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from clients.played_model import Turn, play
from realizar.errors import EngineUnavailableError, QueueFullError
from server_thread import NAME, RunningServer
from waits import HANG_S


class Answer(pydantic.BaseModel):
    city: str
    celsius: int
    sky: Literal["clear", "cloudy"] = "clear"


class Add(pydantic.BaseModel):
    """Add two numbers."""

    a: int
    b: int


class Weather(pydantic.BaseModel):
    """The weather of a city."""

    city: str


ANSWER = Answer(city="Paris", celsius=21)
SAID = Turn(ANSWER.model_dump_json())
BOTH = Turn("", (("Add", {"a": 2, "b": 3}), ("Weather", {"city": "Paris"})), "I need two tools.")
RESULTS = {"Add": "5", "Weather": "21 C"}
THINK: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture
def client(played: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{played.url}/v1", api_key="none", timeout=HANG_S) as client:
        yield client


def ask(*turns: Turn) -> list[Any]:
    return [{"role": "user", "content": play(*turns)}]


def results_of(message: Any) -> list[Any]:
    return [
        {"role": "tool", "tool_call_id": call.id, "content": RESULTS[call.function.name]} for call in message.tool_calls
    ]


@pytest.mark.parametrize("extra", [{}, THINK], ids=["", "reasoning"])
def test_parse_with_tools_and_a_schema(client: openai.OpenAI, extra: dict[str, Any]) -> None:
    tools = [openai.pydantic_function_tool(Add), openai.pydantic_function_tool(Weather)]
    messages = ask(BOTH, SAID)
    options: Any = {"model": NAME, "tools": tools, "response_format": Answer, "extra_body": extra}
    first = client.chat.completions.parse(messages=messages, **options).choices[0]
    assert first.finish_reason == "tool_calls"
    calls = first.message.tool_calls
    assert calls is not None
    assert [call.function.parsed_arguments for call in calls] == [Add(a=2, b=3), Weather(city="Paris")]
    messages += [first.message, *results_of(first.message)]
    last = client.chat.completions.parse(messages=messages, **options).choices[0]
    assert (last.finish_reason, last.message.parsed) == ("stop", ANSWER)


@pytest.mark.parametrize("extra", [{}, THINK], ids=["", "reasoning"])
def test_stream_with_tools_and_a_schema(client: openai.OpenAI, extra: dict[str, Any]) -> None:
    tools = [openai.pydantic_function_tool(Add), openai.pydantic_function_tool(Weather)]
    messages = ask(BOTH, SAID)
    options: Any = {"model": NAME, "tools": tools, "response_format": Answer, "extra_body": extra}
    with client.chat.completions.stream(messages=messages, **options) as stream:
        kinds = {event.type for event in stream}
        first = stream.get_final_completion().choices[0]
    assert {"chunk", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    calls = first.message.tool_calls
    assert calls is not None
    assert [call.function.parsed_arguments for call in calls] == [Add(a=2, b=3), Weather(city="Paris")]
    messages += [first.message, *results_of(first.message)]
    with client.chat.completions.stream(messages=messages, **options) as stream:
        kinds = {event.type for event in stream}
        last = stream.get_final_completion().choices[0]
    assert {"content.delta", "content.done"} <= kinds
    assert last.message.parsed == ANSWER


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Add"}}])
def test_forced_calls(client: openai.OpenAI, choice: Any) -> None:
    turn = Turn(calls=(("Add", {"a": 2, "b": 3}),))
    tools = [openai.pydantic_function_tool(Add), openai.pydantic_function_tool(Weather)]
    done = client.chat.completions.parse(
        model=NAME, messages=ask(turn), tools=tools, tool_choice=choice, response_format=Answer
    )
    calls = done.choices[0].message.tool_calls
    assert calls is not None
    assert [call.function.parsed_arguments for call in calls] == [Add(a=2, b=3)]


def test_a_stream_of_reasoning_alone_is_taken_back(client: openai.OpenAI) -> None:
    messages = ask(Turn(think="Only this."), Turn("Now."))
    with client.chat.completions.stream(model=NAME, messages=messages, extra_body=THINK) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    assert message.model_dump()["reasoning_content"].strip() == "Only this."
    sent: Any = message.model_dump(exclude_none=True)
    done = client.chat.completions.create(model=NAME, messages=[*messages, sent])
    assert done.choices[0].message.content == "Now."


def test_a_cut_answer_raises_the_clients_own_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model=NAME, messages=ask(SAID), response_format=Answer, max_tokens=5)


@pytest.mark.parametrize("error", [QueueFullError("the queue is full", 0.01), EngineUnavailableError("starting", 0.01)])
def test_the_client_tries_again(played: RunningServer, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    generate, refusals = played.engine.generate, [error, error]

    async def refused(*args: Any, **options: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return await generate(*args, **options)

    monkeypatch.setattr(played.engine, "generate", refused)
    with openai.OpenAI(base_url=f"{played.url}/v1", api_key="none", max_retries=2) as client:
        raw = client.chat.completions.with_raw_response.create(model=NAME, messages=ask(Turn("At last.")))
    assert raw.retries_taken == 2
    assert raw.parse().choices[0].message.content == "At last."


def test_errors_have_the_clients_classes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.chat.completions.create(model="nobody", messages=ask(Turn("Hi.")))
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=ask(Turn("x" * (256 << 10))))
    assert caught.value.code == "context_length_exceeded"


def response_tools() -> list[Any]:
    made = []
    for kind in (Add, Weather):
        function = openai.pydantic_function_tool(kind)["function"]
        made.append({"type": "function", **function})
    return made


@pytest.mark.parametrize("stored", [True, False])
def test_responses_parse_with_tools_and_a_schema(client: openai.OpenAI, stored: bool) -> None:
    items = ask(BOTH, SAID)
    options: Any = {"model": NAME, "tools": response_tools(), "text_format": Answer, "store": stored}
    first = client.responses.parse(input=items, **options)
    calls = [item for item in first.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"a": 2, "b": 3}, {"city": "Paris"}]
    results: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": RESULTS[call.name]} for call in calls
    ]
    if stored:
        last = client.responses.parse(input=results, previous_response_id=first.id, **options)
    else:
        last = client.responses.parse(input=[*items, *first.output, *results], **options)
    assert last.output_parsed == ANSWER


def test_responses_stream_with_tools_and_a_schema(client: openai.OpenAI) -> None:
    options: Any = {"model": NAME, "tools": response_tools(), "text_format": Answer}
    with client.responses.stream(input=ask(BOTH, SAID), **options) as stream:
        kinds = {event.type for event in stream}
        first = stream.get_final_response()
    assert {"response.function_call_arguments.delta", "response.completed"} <= kinds
    calls = [item for item in first.output if item.type == "function_call"]
    results: list[Any] = [
        {"type": "function_call_output", "call_id": call.call_id, "output": RESULTS[call.name]} for call in calls
    ]
    with client.responses.stream(input=results, previous_response_id=first.id, **options) as stream:
        for _ in stream:
            pass
        last = stream.get_final_response()
    assert last.output_parsed == ANSWER
    assert client.responses.retrieve(last.id).output_text == last.output_text
    assert client.responses.input_items.list(last.id).data
    client.responses.delete(last.id)
    assert client.responses.input_tokens.count(model=NAME, input="Hello").input_tokens > 0


async def _streamed(url: str) -> Any:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=HANG_S) as client:
        stream = client.chat.completions.stream(model=NAME, messages=ask(SAID), response_format=Answer)
        async with stream as events:
            async for _ in events:
                pass
            return (await events.get_final_completion()).choices[0].message.parsed


def test_the_asynchronous_client_streams(played: RunningServer) -> None:
    assert asyncio.run(_streamed(played.url)) == ANSWER


def test_completions_and_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME, "other"]
    assert client.models.retrieve(NAME).id == NAME
    done = client.completions.create(model=NAME, prompt=f"<|im_start|>user\n{play(Turn('Text.'))}", max_tokens=4)
    assert done.choices[0].text == "Text"
