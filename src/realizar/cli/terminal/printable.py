"""Texts of files, models and the network on their way to a terminal: none may steer it. Standard library only.

A terminal obeys control characters: a name in a model file could rewrite what stands on the screen, its title, or what
is typed next. Everything that a command shows and did not write itself passes here.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import Any

_MAX_LINE = 4000
# C0, DEL and C1 without line breaks and tabs; a lone U+009B is an escape sequence's start to some terminals.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: object) -> str:
    """One line of a text with every character escaped that has no glyph: `\\x1b`, `\\n`, U+202E."""
    line = str(text)
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else _escaped(char) for char in line)


def error_line(error: BaseException | str) -> str:
    """An error's message as one printable line of bounded length."""
    line = " ".join(str(error).split()) or type(error).__name__
    return printable(line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]}...")


def shown_answer(text: str) -> str:
    """A model's words as stdout takes them: control characters but line breaks and tabs are escaped on a terminal.

    Elsewhere, in a file or a pipe, the words are left as they are.
    """
    return _CONTROL.sub(lambda found: _escaped(found.group()), text) if sys.stdout.isatty() else text


def json_line(value: Any) -> str:
    """A value as JSON on one line, letters of all scripts as they are and what has no glyph as `\\uXXXX`."""
    text = json.dumps(value, ensure_ascii=False)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


class PrintableFormatter(logging.Formatter):
    """Log lines without control characters but line breaks and tabs: they may name what a file or a client calls so."""

    def format(self, record: logging.LogRecord) -> str:
        return _CONTROL.sub(lambda found: _escaped(found.group()), super().format(record))


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
