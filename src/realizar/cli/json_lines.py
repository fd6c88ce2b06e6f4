"""JSON lines: reading and writing for `tokenize` and `score`. Standard library only."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

from realizar.errors import InvalidRequestError


def read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate the objects of a JSON lines file without blank lines, each with its place (`in.jsonl:3`) for messages.

    It raises InvalidRequestError if a line is not a JSON object, or not UTF-8.
    """
    name = "stdin" if str(path) == "-" else str(path)
    source = nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb")
    with source as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            place = f"{name}:{number}"
            try:
                value = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                raise InvalidRequestError(f"{place}: the line is not JSON: {error}") from error
            if not isinstance(value, dict):
                raise InvalidRequestError(f"{place}: the line is not a JSON object")
            yield place, value


def text_of(place: str, line: dict[str, Any]) -> str:
    """The line's `text`. It raises InvalidRequestError if that is missing, no string, or holds a lone surrogate."""
    text = line.get("text")
    if not isinstance(text, str):
        raise InvalidRequestError(f"{place}: the line has no string `text`", "text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{place}: `text` has a lone surrogate at {error.start}", "text") from error
    return text


def tokens_of(place: str, line: dict[str, Any]) -> list[int] | None:
    """The line's `tokens`, or None if it has none. It raises InvalidRequestError if they are not a list of integers."""
    tokens = line.get("tokens")
    if tokens is None:
        return None
    if not isinstance(tokens, list) or any(type(token) is not int for token in tokens):
        raise InvalidRequestError(f"{place}: `tokens` is not a list of integers", "tokens")
    return tokens


@contextmanager
def json_lines_writer(path: Path) -> Iterator[TextIO]:
    """A text stream to write lines to; stdout for `-`."""
    if str(path) == "-":
        yield sys.stdout
        return
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        yield stream
