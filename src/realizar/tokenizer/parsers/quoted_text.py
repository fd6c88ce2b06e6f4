"""Texts in quotes that their templates do not escape: a quote ends a text only where the call goes on behind it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from realizar.tokenizer.parsers.argument_types import string_text
from realizar.tokenizer.parsers.cursor import Cursor, Give, MismatchError, Reading, T, ahead, pass_until

IsEnd = Callable[[Cursor], Reading[bool]]

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""} | {char: char for char in "'\"\\/"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile("[0-9a-fA-F]+")


@dataclass(frozen=True, slots=True)
class QuoteEnds:
    """Where a text between quotes may end. Each reading begins behind a quote.

    Attributes:
        is_end: returns True if the text ends there.
        closers: brackets that close the call: before these the text ends if no later quote ends it, as words follow
            then and the mark of the call's end is missing.
        marks: around calls. No text has one that is a token.
    """

    is_end: IsEnd
    closers: Sequence[str]
    marks: tuple[str, str]


def pass_quoted(cursor: Cursor, give: Give, quote: str, ends: QuoteEnds, *, escaped: bool = True) -> Reading[None]:
    """Read a text behind its first quote; `give` gets a JSON string as it arrives.

    If `escaped`, a backslash escapes what follows it, as in Python. Raises MismatchError where the answer ends in the
    text; the cursor is after the text that was given.
    """
    give('"')
    marks = (quote, "\\") if escaped else (quote,)
    num_inside = 0  # next quotes that are known to be part of the text
    while found := (yield from pass_until(cursor, marks, lambda text: give(string_text(text)))):
        cursor.release()
        if found == "\\":
            yield from _pass_escape(cursor, give)
            continue
        cursor.position += len(quote)
        if num_inside:
            num_inside -= 1
        elif (yield from ahead(cursor, ends.is_end(cursor))):
            give('"')
            return
        elif (yield from ahead(cursor, _closes(cursor, ends))):
            num_behind = (yield from ahead(cursor, _ends_behind(cursor, marks, ends))) or 0
            if not num_behind:
                give('"')
                return
            num_inside = num_behind - 1
        give(string_text(quote))
    raise MismatchError


def _ends_behind(cursor: Cursor, marks: tuple[str, ...], ends: QuoteEnds) -> Reading[int]:
    """How many quotes further on the text ends; 0 if at none of them."""
    tokens = tuple(mark for mark in ends.marks if mark in cursor.tokens)
    count = last = 0
    while (found := (yield from _attempt(cursor.next_of((*marks, *tokens)), ""))) and found not in tokens:
        place = cursor.position
        if found == marks[0]:
            count += 1
            if (yield from _attempt(ends.is_end(cursor), False)):
                return count
            cursor.position = place
            if (yield from _attempt(_closes(cursor, ends), False)):
                last = count
        cursor.position = place + (found != marks[0])  # a backslash and what it escapes
    return last


def _closes(cursor: Cursor, ends: QuoteEnds) -> Reading[bool]:
    """True if the call's brackets close at the next text; else MismatchError."""
    for closer in ends.closers:
        yield from cursor.space()
        yield from cursor.expect(closer)
    return True


def _attempt(reading: Reading[T], otherwise: T) -> Reading[T]:
    """The result of reading on in undecided text; `otherwise` if the text does not match, or is too long."""
    try:
        return (yield from reading)
    except MismatchError:
        return otherwise


def ends_calls(cursor: Cursor, start: str, end: str, begins: IsEnd) -> Reading[bool]:
    """True if a call is over at the next text: the answer's end, another call, or the mark of its end.

    A mark that is no token may be quoted, so more words behind it belong to the call where another end follows them.
    `start` and `end` are marks around calls; `begins` reads on behind `start`, and returns True if that is a call.
    """
    yield from cursor.space()
    if not (yield from cursor.peek()):
        return True
    if (yield from cursor.optional(start)):
        return (yield from begins(cursor))
    if not (yield from cursor.optional(end)):
        return False
    if end in cursor.tokens:
        return True
    yield from cursor.space()
    while found := (yield from cursor.next_of((start, end))):
        if found == end or (yield from begins(cursor)):
            return found == start
    return True


def _pass_escape(cursor: Cursor, give: Give) -> Reading[None]:
    """Read a backslash and what belongs to it; one that escapes nothing is a character of its own."""
    yield from _wait(cursor, 2)
    kind = cursor.text[cursor.position + 1 : cursor.position + 2]
    if kind in _ESCAPES and kind:
        give(string_text(_ESCAPES[kind]))
        cursor.position += 2
        return
    size = _HEX_DIGITS.get(kind, 0)
    if size:
        yield from _wait(cursor, 2 + size)
        digits = cursor.text[cursor.position + 2 : cursor.position + 2 + size]
        if len(digits) == size and _HEX.fullmatch(digits) and int(digits, 16) < 0x110000:
            code = int(digits, 16)
            give(f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else string_text(chr(code)))
            cursor.position += 2 + size
            return
    give(string_text("\\"))
    cursor.position += 1


def _wait(cursor: Cursor, size: int) -> Reading[None]:
    while len(cursor.text) - cursor.position < size:
        if not (yield from cursor.more()):
            return
