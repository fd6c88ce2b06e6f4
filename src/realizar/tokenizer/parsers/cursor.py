"""`Cursor`: parsing of arriving text, with code that looks as if all of the text were there.

Parsing functions are generators. A function that needs more text yields, and continues when there is more or the text
has ended. So its decisions depend on the text alone and not on how it was cut. Standard library only.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Give = Callable[[str], None]

# Text that may still turn out to be no call is kept; beyond so many characters it is none.
MAX_UNDECIDED = 128 << 10
_LEAST_RELEASED = 8 << 10  # dropping less would copy the text too often

NAME = re.compile(r"[\w.:/-]*")  # of a function
NAME_LIMIT = 256
_SPACE = re.compile(r"[ \t\r\n]*")


class MismatchError(Exception):
    """The text does not match. The parser catches this; callers never see it."""


class Cursor:
    """A position in growing text.

    Attributes:
        text: the kept text, without its dropped beginning.
        position: index of the next character to read.
        ended: no more text will come.
        undecided: a mismatch may return to `saved`: the text since then is kept.
        has_saved: `save` was called since `begin`.
        tokens: marks that the vocabulary has as tokens: they are in the text only where the model wrote these tokens.
    """

    def __init__(self, tokens: frozenset[str] = frozenset()) -> None:
        self.tokens = tokens
        self.text, self.position, self.saved, self.ended = "", 0, 0, False
        self.undecided = self.has_saved = False
        self._num_appended = 0

    def append(self, text: str) -> None:
        self.text += text
        self._num_appended += 1

    def drop(self) -> None:
        """Drop the text before the position, except its last character, as patterns may look behind."""
        start = max(self.position - 1, 0)
        self.text, self.position, self.saved = self.text[start:], self.position - start, self.position - start

    def begin(self, start: int) -> None:
        """Begin to read what may be a call: a mismatch returns to `start`."""
        self.saved, self.undecided, self.has_saved = start, True, False

    def save(self) -> None:
        """Save the position, so that a later mismatch returns to it."""
        self.saved, self.has_saved = self.position, True

    def release(self) -> None:
        """Drop the text before the position where nothing returns to it, once it is worth it."""
        if not self.undecided and self.position >= max(_LEAST_RELEASED, len(self.text) // 2):
            self.drop()

    @property
    def bound(self) -> int:
        """The position that undecided text may not reach."""
        return self.saved + MAX_UNDECIDED if self.undecided else sys.maxsize

    def check_bound(self) -> None:
        """Raise MismatchError if the undecided text is too long."""
        if self.position >= self.bound:
            raise MismatchError

    def more(self) -> Reading[bool]:
        """Wait for more text; False if it has ended."""
        before = self._num_appended
        while self._num_appended == before:
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Reading[str]:
        """The next character, without reading it; empty at the end."""
        while self.position >= len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.position]

    def optional(self, literal: str) -> Reading[bool]:
        while True:
            if self.text.startswith(literal, self.position):
                self.position += len(literal)
                return True
            if not literal.startswith(self.text[self.position :]) or not (yield from self.more()):
                return False

    def expect(self, literal: str) -> Reading[None]:
        """Raise MismatchError unless a literal is next; read it."""
        if not (yield from self.optional(literal)):
            raise MismatchError

    def one_of(self, literals: Sequence[str]) -> Reading[str]:
        """Read the first of some literals that matches; empty if none does."""
        for literal in literals:
            if (yield from self.optional(literal)):
                return literal
        return ""

    def next_of(self, literals: Sequence[str]) -> Reading[str]:
        """Read past the first literal that comes; empty if the text ends before. MismatchError: too long, undecided."""
        pattern, longest = _any_of(literals), max(map(len, literals))
        while True:
            found = pattern.search(self.text, self.position)
            if found is not None:
                self.position = found.end()
                return found.group()
            self.position = max(self.position, len(self.text) - longest + 1)
            self.check_bound()
            if not (yield from self.more()):
                return ""

    def match(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read a run of a pattern, one set with a star, maybe empty. MismatchError: the undecided text is too long."""
        pieces: list[str] = []
        while True:
            found = pattern.match(self.text, self.position, self.bound)
            if found:
                pieces.append(found.group())
                self.position = found.end()
            self.check_bound()
            if self.position < len(self.text):
                return "".join(pieces)
            self.release()
            if not (yield from self.more()):
                return "".join(pieces)

    def space(self) -> Reading[str]:
        """Read JSON's white space, which may be empty."""
        return (yield from self.match(_SPACE))

    def until(self, literal: str, limit: int) -> Reading[str]:
        """Read past a literal; returns the text before. MismatchError: it does not come within `limit` characters."""
        while True:
            found = self.text.find(literal, self.position, self.position + limit + len(literal))
            if found >= 0:
                before = self.text[self.position : found]
                self.position = found + len(literal)
                return before
            if len(self.text) - self.position >= limit + len(literal) or not (yield from self.more()):
                raise MismatchError


def read_whole(cursor: Cursor, reading: Reading[T]) -> Reading[T]:
    """The result of `reading`, which begins here. Text that does not match stays unread, and raises MismatchError."""
    cursor.begin(cursor.position)
    try:
        return (yield from reading)
    except MismatchError:
        cursor.position = cursor.saved
        raise
    finally:
        cursor.undecided = False


def ahead(cursor: Cursor, reading: Reading[T]) -> Reading[T | None]:
    """The result of reading on, while the cursor stays where it is; None if the text does not match."""
    cursor.begin(cursor.position)
    try:
        return (yield from reading)
    except MismatchError:
        return None
    finally:
        cursor.position, cursor.undecided = cursor.saved, False


def pass_until(cursor: Cursor, literals: Sequence[str], give: Give) -> Reading[str]:
    """Pass text on as it arrives, up to the first of some literals, which stays unread; empty at the text's end.

    The text must be decided: it is dropped once it is passed on.
    """
    pattern = _any_of(literals) if literals else None
    while True:
        found = pattern.search(cursor.text, cursor.position) if pattern is not None else None
        held = 0 if found is not None else overlap(cursor.text, literals, cursor.position)
        end = len(cursor.text) - held if found is None else found.start()
        give(cursor.text[cursor.position : end])
        cursor.position = end
        if found is not None:
            return found.group()
        cursor.drop()
        if not (yield from cursor.more()):
            give(cursor.text[cursor.position :])
            cursor.position = len(cursor.text)
            return ""


def _any_of(literals: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, literals)))


def overlap(text: str, literals: Sequence[str], start: int = 0) -> int:
    """Length of the longest suffix of `text[start:]` that is a proper prefix of one of some literals."""
    longest = 0
    for literal in literals:
        for size in range(min(len(literal) - 1, len(text) - start), longest, -1):
            if text.endswith(literal[:size]):
                longest = size
                break
    return longest
