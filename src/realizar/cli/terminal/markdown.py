"""Markdown of answers, rendered by rich with nothing lost: texts that look like HTML, maths, and line breaks stay."""

from __future__ import annotations

from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich import box
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement, TableElement
from rich.segment import Segment
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

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


class AnswerMarkdown(Markdown):
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
        self.parsed = parse(text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render without the empty line that rich puts before a list, even where nothing precedes it."""
        begun = False
        for part in super().__rich_console__(console, options):
            begun = begun or not isinstance(part, Segment) or part.text != "\n"
            if begun:
                yield part


def parse(text: str) -> list[Token]:
    """The tokens of a text. A single line break in a paragraph is a line break, as chat pages show it."""
    tokens = _PARSER.parse(text)
    for token in tokens:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    return tokens


def first_open_line(tokens: list[Token]) -> int:
    """The line at which the last block begins; later text can change no line before it."""
    starts = [token.map[0] for token in tokens if token.level == 0 and token.map is not None]
    return starts[-1] if starts else 0
