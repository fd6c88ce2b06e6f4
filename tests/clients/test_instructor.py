"""instructor: every mode for servers that speak as OpenAI does, with a try after a wrong answer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import openai
import pydantic
import pytest

from clients.played_model import Turn, play
from server_thread import NAME, RunningServer
from waits import HANG_S

instructor = pytest.importorskip("instructor")


class Answer(pydantic.BaseModel):
    """How warm a city is."""

    city: str
    celsius: int

    @pydantic.field_validator("celsius")
    @classmethod
    def thawed(cls, value: int) -> int:
        if value < 0:
            raise ValueError("too cold")
        return value


class Price(pydantic.BaseModel):
    """What something costs; pydantic writes a look-ahead for it."""

    amount: Decimal


ANSWER, FROZEN = {"city": "Paris", "celsius": 21}, {"city": "Paris", "celsius": -3}
IN_CALLS = ["TOOLS", "TOOLS_STRICT", "FUNCTIONS", "RESPONSES_TOOLS"]
IN_TEXT = ["JSON", "JSON_O1", "JSON_SCHEMA", "MD_JSON"]


def turn_of(mode: str, name: str, value: dict[str, Any]) -> Turn:
    if mode in IN_CALLS:
        return Turn(calls=((name, value),))
    return Turn(f"```json\n{json.dumps(value)}\n```" if mode == "MD_JSON" else json.dumps(value))


def client_of(server: RunningServer, mode: str) -> Any:
    plain = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=HANG_S)
    return instructor.from_openai(plain, mode=getattr(instructor.Mode, mode))


def create(server: RunningServer, mode: str, kind: Any, *turns: Turn, **options: Any) -> Any:
    messages = [{"role": "user", "content": play(*turns)}]
    return client_of(server, mode).chat.completions.create(
        model=NAME, response_model=kind, messages=messages, **options
    )


@pytest.mark.parametrize("mode", [*IN_CALLS, *IN_TEXT])
def test_modes(played: RunningServer, mode: str) -> None:
    """An answer that does not fit the model, then one that does; over Responses instructor keeps none to count."""
    values = (ANSWER,) if mode == "RESPONSES_TOOLS" else (FROZEN, ANSWER)
    turns = [turn_of(mode, "Answer", value) for value in values]
    assert create(played, mode, Answer, *turns, max_retries=2).model_dump() == ANSWER


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "MD_JSON"])
def test_partial_answers(played: RunningServer, mode: str) -> None:
    messages = [{"role": "user", "content": play(turn_of(mode, "PartialAnswer", ANSWER))}]
    client = client_of(played, mode)
    parts = list(client.chat.completions.create_partial(model=NAME, response_model=Answer, messages=messages))
    assert parts[-1].model_dump() == ANSWER


def test_several_models_in_one_answer(played: RunningServer) -> None:
    turn = Turn(calls=(("Answer", ANSWER), ("Answer", ANSWER | {"city": "Rome"})))
    given = create(played, "PARALLEL_TOOLS", Iterable[Answer], turn)
    assert [answer.city for answer in given] == ["Paris", "Rome"]


def test_a_decimal(played: RunningServer) -> None:
    assert create(played, "TOOLS", Price, turn_of("TOOLS", "Price", {"amount": "2.50"})).amount == Decimal("2.5")
