"""Answers with rendered markdown: the same however they arrive, nothing lost, and nothing that harms a terminal."""

from __future__ import annotations

import io
import random
import signal
from collections.abc import Iterator

import pytest
from rich.console import Console

from cli.terminal.screen import shown
from realizar.cli.terminal.markdown_stream import (
    MarkdownStream,
    interrupts_deferred,
    renders_markdown,
    show_markdown,
)

ANSWER = """# Title

Some **bold** and `code`.
Roses are red
Violets are *blue*

- one
- two
  - nested

1. first
2. second

| a | b |
|---|--:|
| 1 | 2 |

```python
def f(x):
    return x


```

> quoted

Last line"""
RENDERED = """Title

Some bold and code.
Roses are red
Violets are blue

 • one
 • two
    • nested

 1 first
 2 second

a   b
─────
1   2

def f(x):
    return x

▌ quoted

Last line""".splitlines()


def rendered(
    deltas: Iterator[str] | list[str], *, width: int = 60, height: int = 24, refresh: bool = True
) -> list[str]:
    """The lines of the screen after an answer; with `refresh`, its last block was drawn again after every delta."""
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=width, height=height, highlight=False)
    stream = MarkdownStream(console)
    for delta in deltas:
        stream._next_s = 0.0 if refresh else 1e18
        stream.feed(delta)
    stream.close()
    lines = shown(written.getvalue())
    assert lines.pop() == "", "the cursor does not begin a line"
    return lines


def cut(text: str, seed: int) -> list[str]:
    generator, deltas = random.Random(seed), []
    while text:
        length = generator.randint(1, 12)
        deltas.append(text[:length])
        text = text[length:]
    return deltas


@pytest.mark.parametrize("refresh", [True, False])
def test_an_answer_is_rendered_the_same_however_it_is_cut(refresh: bool) -> None:
    assert rendered([ANSWER], refresh=refresh) == RENDERED
    assert rendered(list(ANSWER), refresh=refresh) == RENDERED
    for seed in range(5):
        assert rendered(cut(ANSWER, seed), refresh=refresh) == RENDERED


@pytest.mark.parametrize(
    "text",
    [
        "a vector<int> and <b>tags</b> and <!-- comments -->",
        "<div>\nwhole lines\n</div>",
        r"maths \( a_1 * b_2 \) and \[ x^2 \] and \alpha",
        "entities &amp; &lt; stay",
        "![a picture](http://p/q)",
        "[name]: http://target/",
        "<think>\nhm\n</think>",
    ],
)
def test_nothing_is_lost(text: str) -> None:
    kept = "".join(rendered(cut(text, 1)))
    for word in text.replace("(", " ").replace(")", " ").replace("[", " ").replace("]", " ").split():
        assert word in kept, word


def test_words_wrap_and_code_does_not() -> None:
    words = "word " * 30
    code = "x" * 100
    lines = rendered([f"{words}\n\n```\n{code}\n```\n\n- item\n  ```\n  {code}\n  ```\n"], width=40)
    assert lines[:4] == ["word word word word word word word word"] * 3 + ["word word word word word word"]
    assert code in lines, "code can't be copied"
    assert sum(line.count("x") for line in lines) == 200, "code in a list is cut off"


def test_wide_tables_lose_no_cell() -> None:
    names = [f"c{number}" for number in range(30)]
    table = "|".join(names) + "\n" + "|".join("-" * 30) + "\n" + "|".join(f"v{name}" for name in names) + "\n"
    text = " ".join(rendered([table], width=40))
    assert all(f"v{name}" in text for name in names)
    cell = "y" * 70
    assert "".join(rendered([f"|a|b|\n|-|-|\n|{cell}|z|\n"], width=40)).count("y") == 70


@pytest.mark.parametrize(
    "text",
    [
        "```python\nx = 1\n",
        "~~~",
        "> " * 300 + "deep",
        "- " * 300 + "deep",
        "[" * 3000,
        "*a " * 2000,
        "|" * 500,
        "#" * 99,
    ],
    ids=["unclosed", "fence", "quotes", "lists", "brackets", "stars", "bars", "hashes"],
)
@pytest.mark.parametrize("width", [1, 5, 80])
def test_odd_texts_end(text: str, width: int) -> None:
    lines = rendered(cut(text, 3), width=width, height=5, refresh=False)
    assert "x = 1" not in text or width < 5 or "x = 1" in lines


def test_long_blocks_are_shown_in_parts() -> None:
    code = "".join(f"line_{number} = {number}\n" for number in range(5000))
    lines = rendered([f"```python\n{code}", "```\n\nafter"])
    assert [line for line in lines if line] == [*code.splitlines(), "after"]
    long = "y" * 100_000
    assert "".join(rendered([long[at : at + 1000] for at in range(0, len(long), 1000)], refresh=False)) == long


def test_what_grows_is_no_taller_than_the_terminal() -> None:
    """Lines that left the screen could not be taken back."""
    written = io.StringIO()
    stream = MarkdownStream(Console(file=written, force_terminal=True, width=40, height=6, highlight=False))
    for number in range(40):
        stream._next_s = 0.0
        before = len(written.getvalue())
        stream.feed(f"- item {number}\n")
        assert written.getvalue()[before:].count("\n") < 6
    stream.close()
    assert [line.strip() for line in shown(written.getvalue())[:-1]] == [f"• item {number}" for number in range(40)]


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Stands in for stdout, as the command opens it."""
    terminal = Terminal(io.BytesIO(), encoding="utf-8", errors="replace")
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return terminal


def written(terminal: Terminal) -> str:
    terminal.flush()
    buffer = terminal.buffer
    assert isinstance(buffer, io.BytesIO)
    return buffer.getvalue().decode()


def test_control_characters_of_a_model_are_shown_and_not_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    hostile = ["a\x1b[2J", "\x1b]0;title\x07", "```\n\x9b31m\n```\n", "[l](http://x\x1b[H)", "b\rc \ud800 \x00"]
    show_markdown(iter(hostile))
    text = "\n".join(shown(written(terminal)))
    for escaped in ("\\x1b[2J", "\\x1b]0;title\\x07", "\\x9b31m", "\\r", "\\x00", "?"):
        assert escaped in text, escaped


def test_an_interrupted_answer_stays_and_the_cursor_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)

    def answer() -> Iterator[str]:
        yield "**half** a sen"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        show_markdown(answer())
    text = written(terminal)
    assert shown(text)[0] == "half a sen"
    assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l") > -1


@pytest.mark.parametrize(("term", "renders"), [("xterm", True), ("dumb", False), ("unknown", False)])
def test_terminals_that_take_no_line_back_get_plain_text(
    monkeypatch: pytest.MonkeyPatch, term: str, renders: bool
) -> None:
    open_terminal(monkeypatch)
    monkeypatch.setenv("TERM", term)
    assert renders_markdown() is renders
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert not renders_markdown()


def test_an_empty_answer_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    show_markdown(iter(["", "\n", " "]))
    assert written(terminal) == ""


@pytest.mark.usefixtures("python_handler")
def test_an_interrupt_waits_for_the_end_of_what_is_shown() -> None:
    parts = []

    def show_part() -> None:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            parts.append("whole")

    with pytest.raises(KeyboardInterrupt):
        show_part()
    assert parts == ["whole"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_handler_is_left_alone() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with interrupts_deferred():
            signal.raise_signal(signal.SIGINT)
            assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)
