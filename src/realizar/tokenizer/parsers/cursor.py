"""`Cursor`: reading text that is still arriving, with code that reads as if all of it were there.

Readers are generators. One that needs more text yields, and goes on when there is more or the text has ended; so its
decisions depend on the text alone and not on how it was cut. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Give = Callable[[str], None]

_SPACE = re.compile(r"[ \t\r\n]*")


class MismatchError(Exception):
    """The text is not what the reader looks for. Caught by the parser; never seen by a caller."""


class Cursor:
    """A place in growing text.

    Attributes:
        text: what is kept; what was dropped before is not counted.
        position: of the next character to read.
        ended: whether nothing more will come.
        saved: where to go back to on a mismatch.
    """

    def __init__(self) -> None:
        self.text, self.position, self.saved, self.ended = "", 0, 0, False
        self._num_appended = 0

    def append(self, text: str) -> None:
        """Add what arrived."""
        self.text += text
        self._num_appended += 1

    def drop(self) -> None:
        """Forget what was read, but for its last character: patterns may ask what stands before a place."""
        start = max(self.position - 1, 0)
        self.text, self.position, self.saved = self.text[start:], self.position - start, self.position - start

    def save(self) -> None:
        """Count everything read so far as done with."""
        self.saved = self.position

    def more(self) -> Reading[bool]:
        """Wait for more text; False where it has ended."""
        before = self._num_appended
        while self._num_appended == before:
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Reading[str]:
        """The next character, not read; empty at the end."""
        while self.position >= len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.position]

    def optional(self, literal: str) -> Reading[bool]:
        """Read a literal if it is next."""
        while True:
            if self.text.startswith(literal, self.position):
                self.position += len(literal)
                return True
            if not literal.startswith(self.text[self.position :]) or not (yield from self.more()):
                return False

    def expect(self, literal: str) -> Reading[None]:
        """Read a literal.

        Raises:
            MismatchError: something else is next.
        """
        if not (yield from self.optional(literal)):
            raise MismatchError

    def one_of(self, literals: Sequence[str]) -> Reading[str]:
        """Read the first of some literals that is next; empty where none is."""
        for literal in literals:
            if (yield from self.optional(literal)):
                return literal
        return ""

    def match(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read all that a pattern matches, which must be one whose matches grow with the text; may be empty."""
        while True:
            found = pattern.match(self.text, self.position)
            end = found.end() if found else self.position
            if end < len(self.text) or not (yield from self.more()):
                matched = self.text[self.position : end]
                self.position = end
                return matched

    def space(self) -> Reading[str]:
        """Read white space, as JSON has it; may be none."""
        return (yield from self.match(_SPACE))

    def until(self, literal: str, limit: int) -> Reading[str]:
        """Read up to a literal and over it; gives what stands before.

        Raises:
            MismatchError: it does not come within `limit` characters.
        """
        while True:
            found = self.text.find(literal, self.position, self.position + limit + len(literal))
            if found >= 0:
                before = self.text[self.position : found]
                self.position = found + len(literal)
                return before
            if len(self.text) - self.position >= limit + len(literal) or not (yield from self.more()):
                raise MismatchError


def overlap(text: str, literals: Sequence[str], start: int = 0) -> int:
    """Length of the longest end of `text[start:]` that is a beginning, not the whole, of one of some literals."""
    longest = 0
    for literal in literals:
        for size in range(min(len(literal) - 1, len(text) - start), longest, -1):
            if text.endswith(literal[:size]):
                longest = size
                break
    return longest
