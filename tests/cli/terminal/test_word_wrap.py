"""Lines of an answer break between words on a terminal, however the text is cut."""

from __future__ import annotations

import io
import re

import pytest

from realizar.cli.commands.run import WordWrapper, show


def wrapped(text: str, width: int, size: int = 1) -> str:
    wrapper = WordWrapper(lambda: width)
    texts = [text[at : at + size] for at in range(0, len(text), size)]
    return "".join(wrapper.feed(text) for text in texts) + wrapper.flush()


TEXT = "The quick brown fox jumps over the lazy dog, again and again.\n\nA second paragraph follows here."


@pytest.mark.parametrize("width", [10, 17, 40])
def test_no_word_is_parted_and_none_is_lost(width: int) -> None:
    lines = wrapped(TEXT, width).split("\n")
    assert all(len(line) <= width for line in lines)
    assert " ".join(" ".join(lines).split()) == " ".join(TEXT.split())
    assert set(re.findall(r"\S+", " ".join(lines))) == set(re.findall(r"\S+", TEXT))


@pytest.mark.parametrize("size", [2, 3, 7, 100])
def test_cuts_do_not_matter(size: int) -> None:
    assert wrapped(TEXT, 17, size) == wrapped(TEXT, 17)


def test_what_fits_is_unchanged() -> None:
    assert wrapped(TEXT, 200) == TEXT
    assert wrapped("12345 789\n", 9) == "12345 789\n"
    assert wrapped("12345 7890", 9) == "12345 \n7890"


def test_words_longer_than_a_line_are_left_to_the_terminal() -> None:
    assert wrapped("a " + "x" * 25 + " b", 10) == "a \n" + "x" * 25 + " b"


def test_wide_characters_may_be_parted_anywhere_and_are_not_held_back() -> None:
    wrapper = WordWrapper(lambda: 5)
    assert wrapper.feed("天地") == "天地"
    assert wrapper.feed("玄") == "\n玄"


def test_marks_take_no_column() -> None:
    assert wrapped("e\u0301e\u0301e\u0301 ab", 6) == "e\u0301e\u0301e\u0301 ab"


def test_code_stays_as_it_is() -> None:
    code = "```python\nfor number in range(10): print(number)\n```\n"
    assert wrapped(code, 10) == code
    assert wrapped(code + "one two three", 9) == code + "one two \nthree"


def test_only_a_terminal_gets_line_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "17")
    for stdout, wrap, broken in ((Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)):
        monkeypatch.setattr("sys.stdout", stdout)
        show(iter([TEXT[:30], TEXT[30:], "\n"]), wrap=wrap)
        assert (stdout.getvalue() != TEXT + "\n") == broken


def test_a_word_held_back_is_shown_when_the_answer_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stdout = Terminal()
    monkeypatch.setattr("sys.stdout", stdout)

    def texts() -> object:
        yield "half a wo"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        show(texts())  # type: ignore[arg-type]
    assert stdout.getvalue() == "half a wo"
