"""Keys during an answer, and the history of what was typed, on real pseudo-terminals."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from realizar.cli.terminal.terminal import LineHistory, history_path, keys_unseen
from waits import HANG_S


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """A terminal's two ends, the one of the keyboard first; stdin is the other."""
    keyboard, program = os.openpty()
    with os.fdopen(program, closefd=False) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        yield keyboard, program
    os.close(keyboard)
    os.close(program)


def test_keys_during_an_answer_do_not_land_in_it(terminal: tuple[int, int]) -> None:
    keyboard, program = terminal
    before = termios.tcgetattr(program)
    with keys_unseen():
        os.write(keyboard, b"abc")
        os.write(program, b"answer")
        assert os.read(keyboard, 100) == b"answer"
        assert os.read(program, 100) == b"abc", "half a line is there for the prompt"
    assert termios.tcgetattr(program) == before
    os.write(keyboard, b"d\n")
    assert os.read(keyboard, 100) == b"d\r\n", "the prompt shows what is typed"


def test_the_terminal_is_as_before_after_an_error(terminal: tuple[int, int]) -> None:
    before = termios.tcgetattr(terminal[1])
    with pytest.raises(KeyboardInterrupt), keys_unseen():
        raise KeyboardInterrupt
    assert termios.tcgetattr(terminal[1]) == before


def test_a_stdin_that_is_no_terminal_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull, encoding="utf-8") as nothing:  # noqa: PTH123
        monkeypatch.setattr("sys.stdin", nothing)
        with keys_unseen():
            pass


def test_lines_are_kept_for_their_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "realizar" / "chat_history"
    history = LineHistory(path)
    history.load()
    for line in ("first", "  ", "zweite Zeile: ü"):
        history.add(line)
    assert path.read_text(encoding="utf-8") == "first\nzweite Zeile: ü\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_the_history_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "chat_history"
    path.write_text("".join(f"line {number}\n" for number in range(2500)))
    LineHistory(path).load()
    assert path.read_text().splitlines() == [f"line {number}" for number in range(1500, 2500)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in tmp_path.iterdir()] == ["chat_history"]


def test_a_history_that_can_not_be_kept_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "below", tmp_path, None):
        history = LineHistory(path)
        history.load()
        history.add("line")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file"]


def test_where_the_history_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert history_path() == tmp_path / "realizar" / "chat_history"
    for relative in ("", "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", relative)
        assert history_path() == Path.home() / ".local/state/realizar/chat_history"


def talk(tiny: Path, state: Path, keys: bytes) -> str:
    """Run a chat whose keys are all typed at the start, and return the text of the terminal."""
    keyboard, program = os.openpty()
    command = [sys.executable, "-m", "realizar", "chat", str(tiny), "-n", "3", "--quiet"]
    environment = {**os.environ, "XDG_STATE_HOME": str(state), "TERM": "xterm", "INPUTRC": os.devnull}
    process = subprocess.Popen(command, stdin=program, stdout=program, stderr=program, env=environment)
    os.close(program)
    shown = b""
    while shown.count(b"> ") < 1:
        shown += os.read(keyboard, 4096)
    os.write(keyboard, keys)
    while True:
        try:
            shown += os.read(keyboard, 4096)
        except OSError:  # the other end is closed
            break
    assert process.wait(HANG_S) == 0, shown
    os.close(keyboard)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode("utf-8", "replace"))


def test_arrow_keys_bring_back_lines_of_earlier_conversations(tiny_path: Path, tmp_path: Path) -> None:
    history = tmp_path / "realizar" / "chat_history"
    history.parent.mkdir()
    history.write_text("/params seed=11\n/quit\n")
    shown = talk(tiny_path, tmp_path, b"\x1b[A\x1b[A\n/quit\n")
    assert "seed=11" in shown
    assert history.read_text().splitlines() == ["/params seed=11", "/quit"] * 2
