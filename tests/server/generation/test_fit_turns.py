"""The oldest turns of a conversation that outgrows the context are dropped, for requests that ask for it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import httpx
import pytest

from realizar.server.app import create_app
from realizar.server.generation.chat_plan import without_oldest
from realizar.server.settings import ServerSettings
from server.responses.test_response_answers import TEMPLATE
from server.scripted_engine import ScriptedEngine, ScriptedInfo, scripted_model

CONTEXT = 1_000


def talk(turns: int, *system: str) -> list[dict[str, Any]]:
    messages = [{"role": role, "content": "be kind"} for role in system]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"question {turn}"})
        messages.append({"role": "assistant", "content": f"call {turn}"})
        messages.append({"role": "tool", "content": f"output {turn}"})
        messages.append({"role": "assistant", "content": f"answer {turn}"})
    return messages


@pytest.mark.parametrize("most", [1, 3, 4, 5, 9, 17, 40, 41, 100])
@pytest.mark.parametrize("system", [(), ("system", "developer")])
def test_whole_turns_are_dropped_and_the_systems_messages_stay(most: int, system: tuple[str, ...]) -> None:
    messages = talk(10, *system)
    tried: list[int] = []

    def fits(shown: list[Any]) -> bool:
        tried.append(len(shown))
        return len(shown) <= most

    kept = without_oldest(messages, fits)
    assert kept[: len(system)] == messages[: len(system)]
    rest = kept[len(system) :]
    assert rest == messages[len(messages) - len(rest) :]
    assert rest[0]["content"] in {f"question {turn}" for turn in (0, 4, 8, 9)}
    assert fits(kept) or len(rest) == 4  # the last turn is never dropped
    assert len(tried) <= 7
    if most >= len(messages):
        assert kept == messages


@pytest.mark.parametrize("messages", [talk(0, "system"), talk(1), [{"role": "assistant", "content": "x"}]])
def test_what_has_one_turn_stays(messages: list[dict[str, Any]]) -> None:
    assert without_oldest(messages, lambda _: False) == messages


def test_a_turn_does_not_begin_between_a_call_and_its_output() -> None:
    calls = [{"id": name} for name in ("a", "b", "never")]
    messages = [
        {"role": "user", "content": "0"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "user", "content": "1"},
        {"role": "tool", "tool_call_id": "a", "content": ""},
        {"role": "user", "content": "2"},
        {"role": "tool", "tool_call_id": "b", "content": ""},
        {"role": "user", "content": "3"},
    ]
    assert without_oldest(messages, lambda _: False) == messages[-1:]
    assert without_oldest(messages[:-1], lambda _: False) == messages[:-1]
    outputs = (3, 5)
    assert without_oldest([messages[place] for place in range(6) if place not in outputs], lambda _: False) == [
        messages[4]
    ]


class SmallEngine(ScriptedEngine):
    """An engine with a short context."""

    @property
    def info(self) -> ScriptedInfo:
        return ScriptedInfo(max_request_tokens=CONTEXT)


def create(engine: ScriptedEngine, path: str, **body: Any) -> httpx.Response:
    app = create_app(cast("Any", engine), scripted_model(TEMPLATE), ServerSettings())

    async def main() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post(path, json=body)

    return asyncio.run(main())


@pytest.mark.parametrize("turns", [12, 2_000])
def test_a_response_with_truncation_says_what_it_left_out(turns: int, caplog: pytest.LogCaptureFixture) -> None:
    engine = SmallEngine()
    items = [
        {"role": role, "content": f"{role} {turn} " + "x" * 40}
        for turn in range(turns)
        for role in ("user", "assistant")
    ]
    body = {"input": [*items, {"role": "user", "content": "Last?"}], "instructions": "Be brief."}
    create(engine, "/v1/responses", **body)
    assert not engine.asked or len(engine.asked[-1][0]) > CONTEXT  # which a real engine refuses
    with caplog.at_level(logging.INFO):
        made = create(engine, "/v1/responses", **body, truncation="auto").json()
    prompt = bytes(engine.asked[-1][0]).decode()
    assert len(prompt) <= CONTEXT * 3 // 4
    assert prompt.startswith("system:Be brief.|user:user ")
    assert prompt.removesuffix("<think>").endswith("|user:Last?|")
    left_out = 2 * turns + 2 - prompt.count("user:") - prompt.count("assistant:") - 1
    assert made["dropped_messages"] == left_out > 0
    assert f"dropped={left_out}" in caplog.text
    assert made["truncation"] == "auto"
    counted = create(engine, "/v1/responses/input_tokens", **body, truncation="auto").json()
    assert counted["input_tokens"] == made["usage"]["input_tokens"] == len(prompt)


def test_what_fits_loses_nothing() -> None:
    made = create(ScriptedEngine(), "/v1/responses", input="Go", truncation="auto").json()
    assert "dropped_messages" not in made
    assert made["truncation"] == "auto"
