"""The conversation of `realizar chat`, with a scripted model."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from realizar.cli.commands.chat import ChatSession, ContextWindow, Message
from realizar.errors import ContextLengthError, InvalidRequestError
from realizar.sampling_params import SamplingParams

Image = pytest.importorskip("PIL.Image", reason="images are decoded by Pillow")


class Model:
    """Repeats the last message, delta by delta, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[Message]] = []
        self.params: list[SamplingParams] = []
        self.fails_after: int | None = None

    def __call__(self, messages: list[Message], params: SamplingParams) -> Iterator[str]:
        self.asked.append([dict(message) for message in messages])
        self.params.append(params)
        content = messages[-1]["content"]
        for number, word in enumerate((content if isinstance(content, str) else content[-1]["text"]).split()):
            if number == self.fails_after:
                raise ContextLengthError("too long")
            yield f"{word}. "
        if self.fails_after is not None:
            raise ContextLengthError("too long")


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def session(model: Model) -> ChatSession:
    return ChatSession(model, SamplingParams(max_tokens=9), ContextWindow(1 << 20, len, pytest.fail))


def say(session: ChatSession, line: str) -> str:
    return "".join(session.handle(line))


def contents(messages: list[Message]) -> list[str]:
    return [f"{message['role']}: {message['content']}" for message in messages]


def test_history_grows_and_is_sent(session: ChatSession, model: Model) -> None:
    assert say(session, "one two") == "one. two. "
    say(session, "three")
    assert contents(model.asked[-1]) == ["user: one two", "assistant: one. two. ", "user: three"]


def test_system_message_comes_first_and_starts_over(session: ChatSession, model: Model) -> None:
    say(session, "one")
    say(session, "/system Be brief.")
    say(session, "two")
    assert contents(model.asked[-1]) == ["system: Be brief.", "user: two"]
    say(session, "/system")
    assert session.messages == []


def test_clear_keeps_the_system_message(session: ChatSession) -> None:
    session.system = "Be brief."
    say(session, "one")
    say(session, "/clear")
    assert contents(session.messages) == ["system: Be brief."]


def test_retry_asks_again_without_the_old_answer(session: ChatSession, model: Model) -> None:
    say(session, "one")
    assert say(session, "/retry") == "one. "
    assert contents(model.asked[-1]) == ["user: one"]
    assert contents(session.messages) == ["user: one", "assistant: one. "]


def test_retry_that_says_nothing_keeps_the_old_answer(session: ChatSession, monkeypatch: pytest.MonkeyPatch) -> None:
    say(session, "one")
    monkeypatch.setattr(session, "answer", lambda _messages, _params: iter(()))
    assert say(session, "/retry") == ""
    assert contents(session.messages) == ["user: one", "assistant: one. "]


def test_retry_needs_a_question(session: ChatSession) -> None:
    with pytest.raises(InvalidRequestError, match="needs a question"):
        say(session, "/retry")


def test_params_are_shown_set_and_used(session: ChatSession, model: Model) -> None:
    assert "temperature=1.0" in say(session, "/params")
    assert "top_k=40" in say(session, "/params temperature=0.5 top-k=40 seed=7")
    say(session, "one")
    assert (model.params[-1].temperature, model.params[-1].top_k, model.params[-1].seed) == (0.5, 40, 7)
    assert model.params[-1].max_tokens == 9


@pytest.mark.parametrize("words", ["heat=1", "temperature", "temperature=hot", "top_k=1.5", "top_p=2", "stop=x"])
def test_wrong_params_change_nothing(session: ChatSession, words: str) -> None:
    before = session.params
    with pytest.raises(InvalidRequestError):
        say(session, f"/params {words}")
    assert session.params == before


def test_save_writes_what_was_said(session: ChatSession, tmp_path: Path) -> None:
    say(session, "/system Ünïcode")
    say(session, "one")
    assert "3 messages" in say(session, f"/save {tmp_path / 'chat.json'}")
    assert json.loads((tmp_path / "chat.json").read_text(encoding="utf-8")) == {"messages": session.messages}
    with pytest.raises(InvalidRequestError, match="No such file"):
        say(session, f"/save {tmp_path}/nonesuch/chat.json")


@pytest.mark.parametrize("line", ["/etc/hosts: what is it?", "/* a comment */\nint x;", "// x", "/clear\nis a command"])
def test_paths_and_code_are_messages(session: ChatSession, model: Model, line: str) -> None:
    say(session, line)
    assert session.messages[-2] == {"role": "user", "content": line}


@pytest.mark.parametrize("line", ["/exit", "/bye", "/quit"])
def test_words_that_leave(session: ChatSession, line: str) -> None:
    say(session, line)
    assert session.finished


def test_save_replaces_conversations_alone(session: ChatSession, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    for _ in range(2):
        say(session, "Hello")
        say(session, f"/save {path}")
        assert json.loads(path.read_text())["messages"] == session.messages
    notes = tmp_path / "notes.md"
    notes.write_text("# Mine\n")
    with pytest.raises(InvalidRequestError, match="is no conversation"):
        say(session, f"/save {notes}")
    assert notes.read_text() == "# Mine\n"


def test_a_new_system_message_says_what_it_drops(session: ChatSession) -> None:
    assert "starts over" not in say(session, "/system Be brief.")
    say(session, "Hello")
    assert "starts over" in say(session, "/system Be kind.")


def test_undo_takes_turns_back(session: ChatSession, model: Model) -> None:
    session.system = "Be brief."
    say(session, "one")
    say(session, "two\nlines")
    assert say(session, "/undo") == "(taken back: two)"
    say(session, "three")
    assert contents(model.asked[-1]) == ["system: Be brief.", "user: one", "assistant: one. ", "user: three"]
    say(session, "/undo")
    say(session, "/undo")
    assert contents(session.messages) == ["system: Be brief."]
    with pytest.raises(InvalidRequestError, match="needs a message"):
        say(session, "/undo")


def test_load_goes_on_with_what_save_wrote(session: ChatSession, model: Model, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    session.system = "Ünïcode"
    say(session, "one")
    say(session, f"/save {path}")
    before = session.messages
    say(session, "/system other")
    assert say(session, f"/load {path}") == f"(loaded 3 messages from {path})"
    assert session.messages == before
    say(session, "two")
    assert contents(model.asked[-1]) == ["system: Ünïcode", "user: one", "assistant: one. ", "user: two"]


def test_a_loaded_question_is_answered_by_retry(session: ChatSession, tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text('[{"role": "user", "content": "one"}]')
    session.system = "dropped"
    assert "/retry" in say(session, f"/load {path}")
    assert say(session, "/retry") == "one. "
    assert contents(session.messages) == ["user: one", "assistant: one. "]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not JSON at character 0"),
        ("[" * 5000, "is not JSON: it is nested"),
        ("\xff", "is not UTF-8 at byte 0"),
        ("7", "holds no list of messages"),
        ('{"messages": {}}', "holds no list of messages"),
        ("[7]", "message 1 of .* has no role of system, user, assistant"),
        ('[{"role": "tool", "content": "x"}]', "message 1 of .* has no role"),
        ('[{"role": ["user"], "content": "x"}]', "message 1 of .* has no role"),
        ('[{"role": "user"}]', "message 1 of .* has no content that is text"),
        ('[{"role": "user", "content": [{"type": "image_url"}]}]', "has no content that is text"),
        ('[{"role": "user", "content": [7]}]', "message 1 of .* has no content that is text, or parts"),
        ('[{"role": "user", "content": [{"type": "text", "text": "\\ud800"}]}]', "message 1 of .* is not UTF-8"),
        (
            '[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:a/b;base64,PHN2Zz4="}}]}]',
            "an image of message 1 of .* is no image of a known format",
        ),
        ('[{"role": "system", "content": [{"type": "text", "text": "a"}]}]', "message 1 of .* has no content that is"),
        ('[{"role": "user", "content": "\\ud800"}]', "message 1 of .* is not UTF-8 at character 0"),
        (
            '[{"role": "system", "content": "a"}, {"role": "user", "content": ""}, {"role": "system", "content": ""}]',
            "message 3 of .* has the role system",
        ),
    ],
)
def test_a_malformed_file_changes_nothing(session: ChatSession, tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "chat.json"
    path.write_bytes(text.encode("latin-1"))
    say(session, "one")
    before = session.messages
    with pytest.raises(InvalidRequestError, match=reason):
        say(session, f"/load {path}")
    assert session.messages == before


def test_files_that_can_not_be_read_are_named(session: ChatSession, tmp_path: Path) -> None:
    for name in (tmp_path, tmp_path / "nonesuch", "~nobody-of-that-name/chat", "nul\0", "/dev/zero"):
        with pytest.raises(InvalidRequestError, match=r"can't read|too large"):
            say(session, f"/load {name}")


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """A WebP file, whatever its name says."""
    path = tmp_path / "a picture.png"
    Image.new("RGB", (3, 2)).save(path, "WEBP", lossless=True)
    return path


def test_images_are_shown_by_the_next_message(session: ChatSession, model: Model, picture: Path) -> None:
    assert say(session, f"/image {picture}") == "(the next message shows it)"
    dropped = str(picture).replace(" ", "\\ ")
    assert say(session, f"/image {dropped}") == "(the next message shows 2 images)"
    assert say(session, f"/image '{picture}'") == "(the next message shows 3 images)"
    assert say(session, "What?\nWhere?") == "What?. Where?. "
    *images, text = model.asked[-1][-1]["content"]
    assert text == {"type": "text", "text": "What?\nWhere?"}
    for part in images:
        kind, _, data = part["image_url"]["url"].partition(";base64,")
        assert (part["type"], kind, base64.b64decode(data)) == ("image_url", "data:image/webp", picture.read_bytes())
    assert len(images) == 3
    say(session, "And now?")
    assert model.asked[-1][-1]["content"] == "And now?"
    assert say(session, "/undo") == "(taken back: And now?)"
    assert say(session, "/undo") == "(taken back: What?)"


@pytest.mark.parametrize("line", ["/image", "/clear", "/system Be brief."])
def test_images_that_wait_are_dropped(session: ChatSession, model: Model, picture: Path, line: str) -> None:
    say(session, f"/image {picture}")
    say(session, line)
    say(session, "What?")
    assert model.asked[-1][-1]["content"] == "What?"


def test_images_go_with_their_question(session: ChatSession, model: Model, picture: Path) -> None:
    """So an image that the engine refuses does not stand before every message."""
    model.fails_after = 0
    say(session, f"/image {picture}")
    with pytest.raises(ContextLengthError):
        say(session, "What?")
    model.fails_after = None
    say(session, "And now?")
    assert contents(session.messages) == ["user: And now?", "assistant: And. now?. "]


def test_saved_conversations_have_their_images(
    session: ChatSession, model: Model, picture: Path, tmp_path: Path
) -> None:
    say(session, f"/image {picture}")
    say(session, "What?")
    before = session.messages
    say(session, f"/save {tmp_path / 'chat.json'}")
    picture.unlink()
    say(session, "/clear")
    say(session, f"/load {tmp_path / 'chat.json'}")
    assert session.messages == before
    assert say(session, "/retry") == "What?. "
    assert model.asked[-1] == before[:1]


def test_no_conversation_is_saved_that_could_not_be_loaded(
    session: ChatSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chat.json"
    say(session, "Ünïcode")
    say(session, f"/save {path}")
    saved = path.read_bytes()
    monkeypatch.setattr("realizar.cli.commands.chat._MOST_BYTES", len(saved))
    say(session, f"/save {path}")
    say(session, "more")
    with pytest.raises(InvalidRequestError, match=f"a file may have {len(saved)}"):
        say(session, f"/save {path}")
    assert path.read_bytes() == saved


def test_what_is_no_image_waits_for_no_message(session: ChatSession, model: Model, tmp_path: Path) -> None:
    text, torn, chat = tmp_path / "a.png", tmp_path / "torn.png", tmp_path / "chat.json"
    text.write_text("<svg/>")
    Image.new("RGB", (64, 64)).save(torn)
    torn.write_bytes(torn.read_bytes()[:-40])
    url = f"data:image/png;base64,{base64.b64encode(torn.read_bytes()).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    chat.write_text(json.dumps([{"role": "user", "content": [part]}]))
    with pytest.raises(InvalidRequestError, match=r"an image of message 1 of .* is malformed"):
        say(session, f"/load {chat}")
    for name, reason in (
        (torn, r"torn\.png is malformed"),
        (text, "is no image of a known format"),
        (tmp_path / "none.png", "/image can't read .*: No such file"),
        (tmp_path, "Is a directory"),
        ("/dev/zero", "/dev/zero has 33554433 bytes"),
    ):
        with pytest.raises(InvalidRequestError, match=reason):
            say(session, f"/image {name}")
    say(session, "What?")
    assert model.asked[-1][-1]["content"] == "What?"


def test_a_refused_question_is_taken_back(session: ChatSession, model: Model) -> None:
    model.fails_after = 0
    with pytest.raises(ContextLengthError):
        say(session, "one")
    assert session.messages == []


def test_what_was_said_before_an_interruption_stays(session: ChatSession) -> None:
    deltas = session.handle("one two")
    assert isinstance(deltas, Iterator)
    assert next(deltas) == "one. "
    deltas.close()  # type: ignore[attr-defined]
    assert contents(session.messages) == ["user: one two", "assistant: one. "]


@pytest.mark.parametrize(
    ("line", "asks"),
    [
        ("Hello", True),
        (" /retry", True),
        ("/retry now", True),
        ("/save x", False),
        ("/usr/bin", True),
        ("/hlep", False),
        ("", False),
    ],
)
def test_lines_that_the_model_answers(line: str, asks: bool) -> None:
    assert ChatSession.asks(line) is asks


@pytest.mark.parametrize("line", ["/nonesuch", "/", "/_answer", "/__init__", "/save", "/load"])
def test_wrong_commands_are_refused(session: ChatSession, line: str) -> None:
    with pytest.raises(InvalidRequestError):
        say(session, line)


def test_help_names_every_command_and_quit_ends(session: ChatSession) -> None:
    text = say(session, "/help")
    for command in ("/help", "/system", "/clear", "/retry", "/undo", "/image", "/params", "/save", "/load", "/quit"):
        assert command in text
    assert say(session, "  ") == ""
    say(session, "/quit")
    assert session.finished
