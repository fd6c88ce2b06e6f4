"""`MarkdownStream` shows an answer on a terminal while it grows, with its markdown rendered."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich import box
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.live import Live
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement, TableElement
from rich.segment import Segment
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from realizar.cli.terminal.printable import shown_answer

_MOST_PENDING = 1 << 15
"""Characters of a block that is shown again and again while it grows; what is longer is shown in parts."""
_GROWTH = 1.25
"""A block is parsed again once it has grown so much, so that a long one costs no more than a few parses of it."""
_REFRESH_S = 0.08
_SHARE = 8
"""A refresh may take an eighth of the time: the model computes on the same processor."""


class MarkdownStream:
    """Renders blocks that are complete once, and the one that still grows again and again in its place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._pending = ""
        self._gap = False
        self._parse_at = 0.0
        self._next_s = 0.0

    def feed(self, text: str) -> None:
        """Take in text, which must hold no control characters but line breaks and tabs."""
        self._pending = self._pending + text if self._pending else text.lstrip("\n")
        if len(self._pending) >= self._parse_at and "\n\n" in self._pending[-len(text) - 1 :]:
            self._print_complete()
        while len(self._pending) > _MOST_PENDING:
            self._print_part()
        if self._pending.strip() and time.monotonic() >= self._next_s:
            self._refresh()

    def close(self) -> None:
        """Show the rest; the cursor is at the beginning of a line afterwards."""
        try:
            self._print(self._pending)
        finally:  # a second Ctrl-C must not leave the cursor hidden
            self._pending = ""
            if self._live is not None:
                self._live.stop()
                self._live = None

    def _print_complete(self) -> None:
        lines = self._pending.split("\n")
        count = _first_open_line(_parse(self._pending))
        if count:
            self._print("\n".join(lines[:count]))
            self._pending = "\n".join(lines[count:])
        self._parse_at = 0 if count else len(self._pending) * _GROWTH

    def _print_part(self) -> None:
        """Show a part of a block that is too long. Code goes on as code."""
        last = _parse(self._pending[:_MOST_PENDING])[-1:]
        end = self._pending.rfind("\n", 0, _MOST_PENDING) + 1 or _MOST_PENDING
        self._print(self._pending[:end])
        reopened = (
            f"{last[0].markup}{last[0].info}\n" if last and last[0].type == "fence" and last[0].level == 0 else ""
        )
        self._pending = reopened + self._pending[end:]
        self._gap, self._parse_at = not reopened, 0

    def _print(self, text: str) -> None:
        """Show a text for good, with an empty line before it if another one was shown."""
        if not text.strip():
            return
        if self._live is not None:
            self._live.update("", refresh=True)
        if self._gap:
            self._console.print()
        self._console.print(_AnswerMarkdown(text), crop=False)
        self._gap = True

    def _refresh(self) -> None:
        started_s = time.monotonic()
        if self._live is None:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        self._live.update(_Growing(self._pending, gap=self._gap), refresh=True)
        now_s = time.monotonic()
        self._next_s = now_s + max(_REFRESH_S, _SHARE * (now_s - started_s))


class _Growing:
    """The last lines of a block that still grows, as many as the terminal has."""

    def __init__(self, text: str, *, gap: bool) -> None:
        self._text, self._gap = text, gap

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(_AnswerMarkdown(self._text), options, pad=False)
        if self._gap:
            lines.insert(0, [])
        for line in lines[-max(console.size.height - 1, 1) :]:
            yield from line
            yield Segment.line()


# Markdown of answers, rendered by rich with nothing lost: texts that look like HTML, maths, and line breaks stay.

_THEME = "ansi_dark"
"""Colours of the terminal itself, without a background."""
_MOST_COLOURED = 20_000
_NARROWEST = 6
"""Columns of the terminal that a column of a table needs at least."""
# What these rules read would be hidden or changed: tags, pictures' addresses, link targets, backslashes of maths.
_UNWANTED = ("html_block", "html_inline", "image", "reference", "escape", "entity")
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable(list(_UNWANTED))


class _LeftHeading(Heading):
    LEVEL_ALIGN: ClassVar[dict[str, JustifyMethod]] = {f"h{level}": "default" for level in range(1, 7)}


class _PlainCode(CodeBlock):
    """Code without padding, a background or broken lines, so that it can be copied."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).removesuffix("\n")
        lexer = self.lexer_name if len(code) <= _MOST_COLOURED else "text"
        text = Syntax(code, lexer, theme=self.theme).highlight(code)
        text.rstrip()
        nested = options.max_width < console.width  # within lists and quotes rich would cut longer lines off
        text.no_wrap, text.overflow = not nested, "fold" if nested else "ignore"
        yield text


class _WholeTable(TableElement):
    """A table whose cells are broken and not cut off; lines of cells where there is no room for columns."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rows = [] if self.header is None or self.header.row is None else [self.header.row]
        rows += [] if self.body is None else self.body.rows
        cells = [[cell.content for cell in row.cells] for row in rows]
        columns = max(map(len, cells), default=0)
        if options.max_width < columns * _NARROWEST:
            yield from (Text(" | ").join(row) for row in cells)
            return
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, style="markdown.table.border", show_edge=False)
        for heading in cells[0] if cells else ():
            table.add_column(heading, header_style="markdown.table.header", overflow="fold")
        for row in cells[1:]:
            table.add_row(*row)
        yield table


class _AnswerMarkdown(Markdown):
    """A text as a renderable of rich. It must hold no control characters but line breaks and tabs."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _LeftHeading,
        "fence": _PlainCode,
        "code_block": _PlainCode,
        "table_open": _WholeTable,
    }

    def __init__(self, text: str) -> None:
        super().__init__("", code_theme=_THEME, justify="default", hyperlinks=False)
        self.parsed = _parse(text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render without the empty line that rich puts before a list, even where nothing precedes it."""
        begun = False
        for part in super().__rich_console__(console, options):
            begun = begun or not isinstance(part, Segment) or part.text != "\n"
            if begun:
                yield part


def _parse(text: str) -> list[Token]:
    """The tokens of a text. A single line break in a paragraph is a line break, as chat pages show it."""
    tokens = _PARSER.parse(text)
    for token in tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    return tokens


def _first_open_line(tokens: list[Token]) -> int:
    """The line at which the last block begins; later text can change no line before it."""
    starts = [token.map[0] for token in tokens if token.level == 0 and token.map is not None]
    return starts[-1] if starts else 0


def renders_markdown() -> bool:
    """True if stdout is a terminal that can take lines back; those in editors, for one, can't (`TERM=dumb`)."""
    return sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def show_markdown(deltas: Iterator[str]) -> None:
    """Print deltas as they arrive; control characters are escaped. The cursor begins a line afterwards."""
    console = Console(file=sys.stdout, highlight=False, emoji=False, markup=False)
    stream = MarkdownStream(console)
    try:
        for delta in deltas:
            if delta:
                with interrupts_deferred():  # half an escape sequence would be shown as text
                    stream.feed(shown_answer(delta))
    finally:
        with interrupts_deferred():
            stream.close()


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold KeyboardInterrupt back until the block has ended, so that what is shown inside it is whole.

    This applies to the main thread with Python's own handler; no other thread can be interrupted.
    """
    if threading.current_thread() is not threading.main_thread() or not _default_handler():
        yield
        return
    interrupted = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupted:
        raise KeyboardInterrupt


def _default_handler() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler
