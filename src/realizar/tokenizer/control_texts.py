"""Keeps control tokens that are spelled in a conversation apart from those that a template writes.

A mark, a private-use character that the conversation does not hold, goes behind the first character of every control
token's text in every string, and of every beginning of one at a string's end, which the next string could complete.
The template renders the marked strings; special tokens are looked for while the marks are there; then they are taken
out. Conversations without such texts, nearly all, are not touched. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_PRIVATE_USE = range(0xE000, 0xF900)


@dataclass(frozen=True, slots=True)
class Hidden:
    """A conversation with marks, and the mark."""

    value: Any
    mark: str


class ControlTextHider:
    """Args: texts: what control tokens are spelled as."""

    def __init__(self, texts: frozenset[str]) -> None:
        longest_first = sorted((text for text in texts if text), key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._firsts = frozenset(text[0] for text in longest_first)
        self._beginnings = frozenset(text[:size] for text in longest_first for size in range(1, len(text)))
        self._longest = max(map(len, longest_first), default=0)

    def hide(self, value: Any) -> Hidden | None:
        """The same structure with marks in its strings; None where none are needed."""
        strings = list(_strings(value))
        if self._whole is None or not any(self._suspect(text) for text in strings):
            return None
        used = set().union(*strings)
        mark = next(chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        return Hidden(self._marked(value, mark), mark)

    def _suspect(self, text: str) -> bool:
        return self._whole is not None and (self._whole.search(text) is not None or self._open_end(text) is not None)

    def _open_end(self, text: str) -> int | None:
        """Where a beginning of a control token starts that runs to the end of the text."""
        for start in range(max(0, len(text) - self._longest), len(text)):
            if text[start] in self._firsts and text[start:] in self._beginnings:
                return start
        return None

    def _marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            return self._mark(value, mark)
        if isinstance(value, Mapping):
            return {key: self._marked(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._marked(item, mark) for item in value)
        return value

    def _mark(self, text: str, mark: str) -> str:
        if self._whole is None:
            return text
        start = self._open_end(text)
        if start is not None:
            text = text[: start + 1] + mark + text[start + 1 :]
        # A mark may uncover no new text, so one pass finds all; overlapping ones are broken by the first's mark.
        while self._whole.search(text):
            text = self._whole.sub(lambda match: match.group()[0] + mark + match.group()[1:], text)
        return text


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
