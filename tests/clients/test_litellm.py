"""litellm's `openai/NAME` and `hosted_vllm/NAME`: marks of the cache, tools, schemas, streams, and its own messages."""

from __future__ import annotations

import json
import os
from typing import Any

import pydantic
import pytest

from clients.played_model import Turn, play
from server_thread import NAME, RunningServer
from waits import HANG_S

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it looks for prices on the network otherwise
litellm = pytest.importorskip("litellm")


class Answer(pydantic.BaseModel):
    city: str
    celsius: int


ANSWER = Answer(city="Paris", celsius=21)
PROVIDERS = ["openai", "hosted_vllm"]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": SCHEMA}, **marks}
    for name, marks in (("weather", {}), ("time", {"cache_control": {"type": "ephemeral"}}))
]
BOTH = Turn("Both.", (("weather", {"city": "Paris"}), ("time", {"city": "Rome"})), "I need two tools.")


def complete(server: RunningServer, provider: str, messages: list[Any], **options: Any) -> Any:
    return litellm.completion(
        f"{provider}/{NAME}", messages, api_base=f"{server.url}/v1", api_key="none", timeout=HANG_S, num_retries=0,
        **options,
    )  # fmt: skip


def marked(text: str) -> list[Any]:
    return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("streamed", [False, True])
def test_tools_and_marks_of_the_cache(played: RunningServer, provider: str, streamed: bool) -> None:
    messages: list[Any] = [
        {"role": "system", "content": marked("Answer.")},
        {"role": "user", "content": marked(play(BOTH, Turn("They are {results}.")))},
    ]
    for _ in range(2):
        given = complete(played, provider, messages, tools=TOOLS, stream=streamed)
        if streamed:
            given = litellm.stream_chunk_builder(list(given), messages=messages)
        message = given.choices[0].message
        messages.append(message)  # as it is
        for call in message.tool_calls or ():
            text = f"{call.function.name} in {json.loads(call.function.arguments)['city']}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": marked(text)})
    assert messages[-1].content == "They are weather in Paris, time in Rome."


@pytest.mark.parametrize("provider", PROVIDERS)
def test_marks_that_it_adds_itself(played: RunningServer, provider: str) -> None:
    points = [{"location": "message", "role": "system"}]
    messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": play(Turn("Yes."))}]
    given = complete(played, provider, messages, cache_control_injection_points=points)
    assert given.choices[0].message.content == "Yes."


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_schema(played: RunningServer, provider: str) -> None:
    messages = [{"role": "user", "content": play(Turn(ANSWER.model_dump_json()))}]
    given = complete(played, provider, messages, response_format=Answer)
    assert Answer.model_validate_json(given.choices[0].message.content) == ANSWER


def test_responses_and_messages(played: RunningServer) -> None:
    given = litellm.responses(
        model=f"openai/{NAME}", input=play(Turn("Yes.")), api_base=f"{played.url}/v1", api_key="none"
    )
    assert given.output[-1].content[0].text == "Yes."
    messages = [{"role": "user", "content": marked(play(Turn("Yes.")))}]
    given = litellm.completion(f"anthropic/{NAME}", messages, api_base=played.url, api_key="none", max_tokens=50)
    assert given.choices[0].message.content == "Yes."


def test_errors_have_its_classes(played: RunningServer) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        complete(played, "openai", [{"role": "user", "content": "x" * (256 << 10)}])
