"""What `realizar chat` does with a line: Ctrl-C and errors end an answer, never the conversation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from realizar.cli.commands.chat import ChatSession, ContextWindow, Message, _handle
from realizar.cli.commands.run import show
from realizar.cli.terminal.markdown_stream import show_markdown
from realizar.errors import EngineDeadError, RequestFailedError
from realizar.sampling_params import SamplingParams


def session(error: BaseException | None) -> ChatSession:
    def answer(_messages: list[Message], _params: SamplingParams) -> Iterator[str]:
        yield "half an "
        if error is not None:
            raise error
        yield "answer"

    return ChatSession(answer, SamplingParams(), ContextWindow(1 << 20, len, pytest.fail))


@pytest.mark.parametrize("shown", [show, show_markdown])
@pytest.mark.parametrize(
    ("error", "said"),
    [(KeyboardInterrupt(), "(stopped)"), (RequestFailedError("it broke\x1b[2J"), "realizar: it broke\\x1b[2J")],
)
def test_an_answer_that_stops_stays_as_far_as_it_came(
    capsys: pytest.CaptureFixture[str], shown: Callable[[Iterator[str]], None], error: BaseException, said: str
) -> None:
    chat = session(error)
    _handle(chat, "Hello", shown)
    captured = capsys.readouterr()
    assert captured.out.strip() == "half an"
    assert captured.err.strip() == said
    assert [message["content"] for message in chat.messages] == ["Hello", "half an "]
    chat.answer = session(None).answer
    _handle(chat, "/retry", shown)
    assert capsys.readouterr().out == "half an answer\n"
    assert [message["content"] for message in chat.messages] == ["Hello", "half an answer"]


def test_an_engine_that_is_gone_ends_the_chat() -> None:
    with pytest.raises(EngineDeadError):
        _handle(session(EngineDeadError("gone")), "Hello", show)


@pytest.mark.parametrize("line", ["caf\udce9", "/nonesuch", "/load /nonesuch"])
def test_a_wrong_line_is_one_message(capsys: pytest.CaptureFixture[str], line: str) -> None:
    chat = session(None)
    _handle(chat, line, show)
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n"), chat.messages) == ("", 1, [])
