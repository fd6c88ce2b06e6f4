"""`ControlTextHider` keeps control tokens' texts in a conversation from becoming control tokens.

It inserts a mark, a private-use character that occurs in neither the conversation nor a control token. The mark goes
after the first character of every control token's text in every string, and of every prefix of one at a string's end,
which the next string could complete. A mark can't break a control token of one character, so another private-use
character replaces that. The template renders the marked strings, special tokens are searched while the marks are there,
and `Hidden.restore` then removes the marks. Nearly all conversations have no such texts and stay as they are.

In what the assistant wrote before (`AnswerText`), templates look for the marks of reasoning, to leave it out; there
those marks stay.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from realizar.errors import InvalidRequestError
from realizar.tokenizer.special_tokens import SpecialTokenFinder

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


@dataclass(frozen=True, slots=True)
class Hidden:
    """A conversation with marks, and the table for `str.translate` that removes them from a text."""

    value: Any
    restore: Mapping[int, str]


class AnswerText(str):
    """What an assistant wrote before."""

    __slots__ = ()


class ControlTextHider:
    """Hides the texts of control tokens; those `kept_in_answers` stay as they are in an `AnswerText`."""

    def __init__(self, texts: frozenset[str], kept_in_answers: Iterable[str] = ()) -> None:
        self._kept = re.compile(f"({'|'.join(map(re.escape, kept_in_answers)) or '(?!)'})")
        self._texts = sorted(text for text in texts if text)
        self._single = frozenset(text for text in self._texts if len(text) == 1)
        self._longer = [text for text in self._texts if len(text) > 1]
        self._finder = SpecialTokenFinder({text: index for index, text in enumerate(self._longer)})
        self._firsts = frozenset(text[0] for text in self._longer)
        self._longest = max(map(len, self._longer), default=0)

    def hide(self, value: Any) -> Hidden | None:
        """Insert marks into strings; None if none are needed. InvalidRequestError: all private-use characters occur."""
        strings = list(self._strings(value))
        if not any(self._is_suspect(text) for text in strings):
            return None
        used: set[str] = set().union(*strings)
        reserved = used.union(*self._texts)
        free = (chr(code) for code in itertools.chain(*_PRIVATE_USE) if chr(code) not in reserved)
        try:
            mark = next(free)
            stand_ins = {ord(text): next(free) for text in sorted(self._single & used)}
        except StopIteration:
            raise InvalidRequestError(
                "the conversation uses all private-use characters, and one must be free", "messages"
            ) from None
        restore = {ord(mark): "", **{ord(stand_in): chr(code) for code, stand_in in stand_ins.items()}}
        return Hidden(self._marked(value, mark, stand_ins), restore)

    def _strings(self, value: Any) -> Iterator[str]:
        if isinstance(value, AnswerText):
            yield from self._kept.split(str(value))[::2]
        elif isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                if _is_text_key(key):
                    yield key
                yield from self._strings(item)
        elif isinstance(value, list | tuple):
            for item in value:
                yield from self._strings(item)

    def _is_suspect(self, text: str) -> bool:
        return (
            not self._single.isdisjoint(text)
            or self._open_end(text) is not None
            or any(isinstance(piece, int) for piece in self._finder.split(text))
        )

    def _open_end(self, text: str) -> int | None:
        """The start of a control token's prefix at the end of the text, or None."""
        for start in range(max(0, len(text) - self._longest), len(text)):
            if text[start] not in self._firsts:
                continue
            end = text[start:]
            at = bisect_left(self._longer, end)
            if at < len(self._longer) and self._longer[at] == end:
                at += 1  # the whole token, which is not a proper prefix
            if at < len(self._longer) and self._longer[at].startswith(end):
                return start
        return None

    def _marked(self, value: Any, mark: str, stand_ins: Mapping[int, str]) -> Any:
        if isinstance(value, AnswerText):
            parts = enumerate(self._kept.split(str(value)))  # every other one stays
            return "".join(part if place % 2 else self._marked(part, mark, stand_ins) for place, part in parts)
        if isinstance(value, str):
            return self._mark(value.translate(stand_ins) if stand_ins else value, mark)
        if isinstance(value, Mapping):
            return {
                self._marked(key, mark, stand_ins) if _is_text_key(key) else key: self._marked(item, mark, stand_ins)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return type(value)(self._marked(item, mark, stand_ins) for item in value)
        return value

    def _mark(self, text: str, mark: str) -> str:
        while (start := self._open_end(text)) is not None:  # a token's end may begin the token again
            text = text[: start + 1] + mark + text[start + 1 :]
        # No control token contains the mark, so each pass leaves fewer tokens: those that overlapped the broken ones.
        while True:
            pieces = list(self._finder.split(text))
            if all(isinstance(piece, str) for piece in pieces):
                return text
            text = "".join(piece if isinstance(piece, str) else self._broken(piece, mark) for piece in pieces)

    def _broken(self, index: int, mark: str) -> str:
        text = self._longer[index]
        return text[0] + mark + text[1:]


def _is_text_key(key: Any) -> bool:
    """True if an object's key may be a user's text. Templates look up names such as `role` by identifiers."""
    return isinstance(key, str) and not key.isidentifier()
