"""Typed and pasted messages and their history, on real pseudo-terminals."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from realizar.cli.terminal.line_editor import LineHistory, history_path
from waits import HANG_S, process


def test_messages_are_kept_for_their_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "realizar" / "chat_history"
    history = LineHistory(path)
    assert list(history.load_history_strings()) == []
    messages = ["first", "zweite Zeile: ü", "two\nlines", "back\\slash \\n", "\\\n\\\\"]
    for message in (*messages, "  "):
        history.store_string(message)
    assert path.read_text(encoding="utf-8").splitlines()[:3] == ["first", "zweite Zeile: ü", r"two\nlines"]
    assert list(LineHistory(path).load_history_strings()) == messages[::-1]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_the_history_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "chat_history"
    path.write_text("".join(f"line {number}\n" for number in range(2500)))
    assert list(LineHistory(path).load_history_strings())[-1] == "line 1500"
    assert path.read_text().splitlines() == [f"line {number}" for number in range(1500, 2500)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["chat_history"]


def test_a_history_that_can_not_be_kept_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "below", tmp_path, None):
        history = LineHistory(path)
        assert list(history.load_history_strings()) == []
        history.store_string("line")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file"]


def test_where_the_history_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert history_path() == tmp_path / "realizar" / "chat_history"
    for relative in ("", "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", relative)
        assert history_path() == Path.home() / ".local/state/realizar/chat_history"


def talk(tiny: Path, state: Path, *turns: bytes, words: Iterable[str] = ()) -> str:
    """Run a chat; each turn is typed at once when the prompt waits for it. Returns the text of the terminal."""
    keyboard, program = os.openpty()
    command = [sys.executable, "-m", "realizar", "chat", str(tiny), "-n", "3", "--quiet", *words]
    environment = {**os.environ, "XDG_STATE_HOME": str(state), "TERM": "xterm"}
    with process(command, stdin=program, stdout=program, stderr=program, env=environment) as chat:
        os.close(program)
        shown = b""
        for number, turn in enumerate(turns, start=1):
            while shown.count(b"\x1b[?2004h") < number:  # pasted text is marked from here on
                shown += os.read(keyboard, 4096)
            os.write(keyboard, turn)
        while True:
            try:
                shown += os.read(keyboard, 4096)
            except OSError:  # the other end is closed
                break
        assert chat.wait(HANG_S) == 0, shown
    os.close(keyboard)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode("utf-8", "replace"))


def test_arrow_keys_bring_back_messages_of_earlier_conversations(tiny_path: Path, tmp_path: Path) -> None:
    history = tmp_path / "realizar" / "chat_history"
    history.parent.mkdir()
    history.write_text("/params seed=11\n/quit\n")
    shown = talk(tiny_path, tmp_path, b"\x1b[A\x1b[A\r", b"/quit\r")
    assert "seed=11" in shown
    assert history.read_text().splitlines() == ["/params seed=11", "/quit"] * 2


def test_pasted_lines_are_one_message(tiny_path: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    pasted = b"\x1b[200~one\ntwo\r\nthree\\\n/quit\x1b[201~"
    shown = talk(tiny_path, tmp_path, pasted + b" four\r", f"/save {saved}\r".encode(), b"/quit\r")
    question, answer = json.loads(saved.read_text(encoding="utf-8"))["messages"]
    assert question == {"role": "user", "content": "one\ntwo\nthree\\\n/quit four"}
    assert answer["role"] == "assistant"
    assert "0 of " in shown, "no meter of the context"
    assert " tokens, " in shown
    history = LineHistory(tmp_path / "realizar" / "chat_history")
    assert list(history.load_history_strings())[-1] == "one\ntwo\nthree\\\n/quit four"


def test_the_meter_leaves_a_message_that_is_complete(tiny_path: Path, tmp_path: Path) -> None:
    shown = talk(tiny_path, tmp_path, b"/undo\r", b"/quit\r")
    assert "> " + " " * 20 in shown  # the meter is at the right margin
    assert re.search(r"> /undo[\r\n]+realizar: /undo needs", shown), shown


def test_lines_go_on_and_keys_of_control_leave_lines(tiny_path: Path, tmp_path: Path) -> None:
    """Escape and Enter or a backslash begin another line; Ctrl-C drops what is typed, Ctrl-D quits."""
    shown = talk(
        tiny_path,
        tmp_path,
        b"/system dropped\x03",
        b"/system one\x1b\rtwo\\\r",
        b"three\r",
        f"/save {tmp_path / 'saved.json'}\r".encode(),
        b"\x04",
        words=["--no-history"],
    )
    (system,) = json.loads((tmp_path / "saved.json").read_text(encoding="utf-8"))["messages"]
    assert system == {"role": "system", "content": "one\ntwo\nthree"}
    assert shown.count("(system message set)") == 1
    assert not (tmp_path / "realizar").exists()


@pytest.mark.parametrize("ends", ["pipe", "terminal"])
def test_a_pipe_gets_text_alone(tiny_path: Path, tmp_path: Path, ends: str) -> None:
    """No control codes where stdout is a pipe, wherever the lines come from."""
    keyboard, program = os.openpty()
    command = [sys.executable, "-m", "realizar", "chat", str(tiny_path), "-n", "3", "--quiet"]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
    lines = b"Hello\n/params\n/quit\n"
    os.write(keyboard, lines)
    source = subprocess.PIPE if ends == "pipe" else program
    with process(command, stdin=source, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as chat:
        out, errors = chat.communicate(lines if ends == "pipe" else None, timeout=HANG_S)
    os.close(keyboard)
    os.close(program)
    assert (chat.returncode, b"\x1b" in out, b"\x1b" in errors) == (0, False, False), (out, errors)
    assert b"temperature=" in out
    assert b"> " not in out
