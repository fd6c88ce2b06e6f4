"""`MarkdownStream` shows an answer on a terminal while it grows, with its markdown rendered."""

from __future__ import annotations

import time

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment

from realizar.cli.terminal.markdown import AnswerMarkdown, first_open_line, parse

_MOST_PENDING = 1 << 15
"""Characters of a block that is shown again and again while it grows; what is longer is shown in parts."""
_GROWTH = 1.25
"""A block is parsed again once it has grown so much, so that a long one costs no more than a few parses of it."""
_REFRESH_S = 0.08
_SHARE = 8
"""A refresh may take an eighth of the time: the model computes on the same processor."""


class MarkdownStream:
    """Renders blocks that are complete once, and the one that still grows again and again in its place.

    Args:
        console: of the terminal.
    """

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
        count = first_open_line(parse(self._pending))
        if count:
            self._print("\n".join(lines[:count]))
            self._pending = "\n".join(lines[count:])
        self._parse_at = 0 if count else len(self._pending) * _GROWTH

    def _print_part(self) -> None:
        """Show a part of a block that is too long. Code goes on as code."""
        last = parse(self._pending[:_MOST_PENDING])[-1:]
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
        self._console.print(AnswerMarkdown(text), crop=False)
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
        lines = console.render_lines(AnswerMarkdown(self._text), options, pad=False)
        if self._gap:
            lines.insert(0, [])
        for line in lines[-max(console.size.height - 1, 1) :]:
            yield from line
            yield Segment.line()
