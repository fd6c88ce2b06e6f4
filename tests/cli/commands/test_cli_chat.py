"""What `realizar chat` does with a line: Ctrl-C and errors end an answer, never the conversation."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from images.vision_models import image_of, write_vision_files
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


def test_an_image_of_the_chat_is_what_run_shows(
    realizar: Callable[..., Any], tmp_path: Path, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that reads text alone says so, and the conversation goes on."""
    pillow = pytest.importorskip("PIL.Image", reason="images are decoded by Pillow")
    pillow.fromarray(image_of((28, 28))).save(tmp_path / "a.png")
    model, options = write_vision_files(tmp_path), ("--max-tokens", "2", "--threads", "1", "--temperature", "0")
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/image {tmp_path}/none.png\n/image {tmp_path}/a.png\nWhat?\n"))
    result = realizar("chat", model, *options)
    assert result.status == 0, result.stderr
    assert "none.png: No such file" in result.error_lines[0]
    assert len(result.error_lines) == 1
    ran = realizar("run", model, "What?", "--image", tmp_path / "a.png", *options)
    assert result.stdout == f"(the next message shows it)\n{ran.stdout}"
    chatted, asked = (re.findall(r"prompt: (\d+) tokens", each.stderr) for each in (result, ran))
    assert len(chatted) == 1
    assert chatted == asked
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/image {tmp_path}/a.png\nHello\n"))
    result = realizar("chat", smollm2_path, *options)
    assert (result.status, len(result.error_lines)) == (0, 1)
    assert re.search("/image can't show .*a.png: .*the model reads text only", result.error_lines[0])
    assert result.stdout.strip()
