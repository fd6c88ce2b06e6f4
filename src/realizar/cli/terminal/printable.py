"""Texts from files, models and the network, made safe for a terminal. Standard library only.

A terminal obeys control characters: a name in a model file could rewrite the screen, its title, or the next input.
Every text that a command shows and did not write itself passes through here.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import Any

_MAX_LINE = 4000
# C0, DEL and C1 without line breaks and tabs; for some terminals a lone U+009B starts an escape sequence.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: object) -> str:
    """A text as one line, with every character escaped that has no glyph, such as `\\x1b`, `\\n` and U+202E."""
    line = str(text)
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else _escaped(char) for char in line)


def error_line(error: BaseException | str) -> str:
    """An error's message as one printable line of bounded length."""
    line = " ".join(str(error).split()) or type(error).__name__
    return printable(line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]}...")


def shown_answer(text: str) -> str:
    """A model's text for stdout. On a terminal, control characters are escaped, except line breaks and tabs.

    In a file or a pipe the text stays as it is.
    """
    return _CONTROL.sub(lambda found: _escaped(found.group()), text) if sys.stdout.isatty() else text


def json_line(value: Any) -> str:
    """A value as JSON on one line, with letters of all scripts; characters without a glyph become `\\uXXXX`."""
    text = json.dumps(value, ensure_ascii=False)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def report(text: object) -> None:
    """Print a line for the user on stderr, beside a command's result."""
    print(printable(text), file=sys.stderr, flush=True)


class PrintableFormatter(logging.Formatter):
    """Formats log lines, which may quote a client's text. Control characters but line breaks and tabs are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        return _CONTROL.sub(lambda found: _escaped(found.group()), super().format(record))


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
