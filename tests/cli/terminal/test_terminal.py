"""Keys during an answer, on real pseudo-terminals."""

from __future__ import annotations

import os
import termios
from collections.abc import Iterator

import pytest

from realizar.cli.commands.chat import keys_unseen


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
