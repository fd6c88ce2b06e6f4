"""A conversation that outgrows the context drops its oldest turns, and a notice says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from realizar.cli.commands.chat import ChatSession, ContextWindow, Message
from realizar.errors import ChatTemplateError, ContextLengthError
from realizar.sampling_params import SamplingParams

CONTEXT = 40


def count(messages: list[Message]) -> int:
    """A token for each character."""
    return sum(len(message["content"]) for message in messages)


class Model:
    """Answers `ok` within its context, as an engine does, and remembers what it saw."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.max_tokens: list[int | None] = []

    def __call__(self, messages: list[Message], params: SamplingParams) -> Iterator[str]:
        if count(messages) + (params.max_tokens or 1) > CONTEXT:
            raise ContextLengthError(f"{count(messages)} tokens")
        self.asked.append([message["content"] for message in messages])
        self.max_tokens.append(params.max_tokens)
        yield "ok"


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def notices() -> list[str]:
    return []


@pytest.fixture
def session(model: Model, notices: list[str]) -> ChatSession:
    return ChatSession(model, SamplingParams(), ContextWindow(CONTEXT, count, notices.append))


def say(session: ChatSession, *lines: str) -> None:
    for line in lines:
        assert "".join(session.handle(line))


def test_every_line_gets_an_answer(session: ChatSession, model: Model, notices: list[str]) -> None:
    lines = [f"{number:08}" for number in range(30)]
    say(session, *lines)
    assert len(model.asked) == 30
    for line, asked in zip(lines, model.asked, strict=True):
        assert asked[-1] == line
        assert asked[0] in lines, "what the model sees begins with a question"
    assert count([{"content": text} for text in model.asked[-1]]) <= CONTEXT * 3 // 4
    assert len(notices) < 15, "several turns go at once"
    assert "no longer sees its first 4 messages" in notices[0]


def test_nothing_is_lost(session: ChatSession, notices: list[str], tmp_path: Path) -> None:
    say(session, *(f"{number:08}" for number in range(9)), f"/save {tmp_path / 'all.json'}")
    assert notices
    saved = json.loads((tmp_path / "all.json").read_text())["messages"]
    assert [message["content"] for message in saved[::2]] == [f"{number:08}" for number in range(9)]


def test_the_system_message_stays(session: ChatSession, model: Model, notices: list[str]) -> None:
    session.system = "brief!"
    say(session, *(f"{number:08}" for number in range(9)))
    assert notices
    assert all(asked[0] == "brief!" for asked in model.asked)


@pytest.mark.parametrize("command", ["/clear", "/system x"])
def test_starting_over_shows_all_again(session: ChatSession, model: Model, notices: list[str], command: str) -> None:
    say(session, *(f"{number:08}" for number in range(5)), command, "one", "two")
    assert model.asked[-1][-3:] == ["one", "ok", "two"]
    assert len(notices) == 1


def test_retry_after_a_cut(session: ChatSession, model: Model) -> None:
    say(session, *(f"{number:08}" for number in range(5)))
    seen = model.asked[-1]
    say(session, "/retry")
    assert model.asked[-1] == seen


def test_the_meter_counts_what_the_model_sees(session: ChatSession, notices: list[str]) -> None:
    assert session.meter == "0 of 40 tokens, 0 %"
    say(session, "x" * 8)
    assert session.meter == "10 of 40 tokens, 25 %"
    say(session, *["x" * 8] * 2)
    assert (session.meter, notices) == ("30 of 40 tokens, 75 %", [])
    say(session, "x" * 8)
    assert notices
    assert session.meter == "20 of 40 tokens, 50 %"
    say(session, "/undo", "/undo", "/undo", "/undo")
    assert session.meter == "0 of 40 tokens, 0 %"


def test_the_meter_is_full_at_most(session: ChatSession) -> None:
    session._messages += [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * CONTEXT}]
    assert session.meter == "40 of 40 tokens, 100 %"


def test_a_template_that_refuses_leaves_the_meter_empty(model: Model) -> None:
    def refuse(_messages: list[Message]) -> int:
        raise ChatTemplateError("no")

    session = ChatSession(model, SamplingParams(), ContextWindow(CONTEXT, refuse, lambda _: None))
    session._messages.append({"role": "user", "content": "x"})
    assert session.meter == ""


def test_undo_after_a_cut_shows_again_what_is_left(session: ChatSession, model: Model) -> None:
    say(session, *(f"{number:08}" for number in range(5)))
    say(session, "/undo", "/undo", "/undo", "/undo", "new")
    assert model.asked[-1] == ["00000000", "ok", "new"]


def test_a_line_longer_than_the_context_is_refused_and_taken_back(session: ChatSession, model: Model) -> None:
    say(session, "one")
    with pytest.raises(ContextLengthError):
        say(session, "x" * 60)
    assert [message["content"] for message in session.messages] == ["one", "ok"]
    say(session, "two")
    assert model.asked[-1][-1] == "two"


def test_a_bound_on_the_answer_gives_way_to_the_context(model: Model, notices: list[str]) -> None:
    window = ContextWindow(CONTEXT, count, notices.append)
    session = ChatSession(model, SamplingParams(max_tokens=30, min_tokens=30), window=window)
    say(session, "x" * 8, "x" * 8)
    assert model.max_tokens == [30, CONTEXT - 18]
    assert not notices
