"""Calls written as in Python, `[name(key='text', other=1)]` (LFM2), passed on as JSON. Standard library only."""

from __future__ import annotations

import re

from realizar.tokenizer.marks import LFM2_CALLS, LFM2_CALLS_END
from realizar.tokenizer.parsers.argument_types import pass_bare_value, string_text
from realizar.tokenizer.parsers.calls import Calls, read_arguments
from realizar.tokenizer.parsers.cursor import Cursor, Give, MismatchError, Reading, pass_until, read_whole
from realizar.tokenizer.parsers.pythonic_grammar import PythonicRules
from realizar.tokenizer.parsers.styles import CallForm, ToolStyle, long_id

_NAME, _KEY = re.compile(r"[\w.:/-]*"), re.compile(r"[\w-]*")
_SPACES, _KEY_LIMIT = " \t\r\n", 256
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_BARE_ENDS = (",", ")", "]", "}", LFM2_CALLS_END)  # a bare value ends at one of these, which are not part of it
_BEHIND_TEXT = ",)]}:"  # a quote with one of these behind it ends a text, for templates escape none within
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""} | {char: char for char in "'\"\\/"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile("[0-9a-fA-F]+")


def _read_calls(cursor: Cursor, calls: Calls, mark: str) -> Reading[None]:
    yield from cursor.space()
    yield from cursor.optional("[")
    while True:
        yield from cursor.space()
        name = yield from cursor.match(_NAME)
        yield from read_arguments(cursor, calls, name, (LFM2_CALLS_END,), _pass_arguments, opens="(")
        yield from cursor.space()
        if not (yield from cursor.optional(",")):
            break
    yield from cursor.optional("]")
    yield from cursor.space()
    yield from cursor.optional(LFM2_CALLS_END)
    cursor.save()


def _pass_arguments(cursor: Cursor, give: Give) -> Reading[None]:
    """Read the brackets and all between them; `give` gets an object's JSON as it arrives.

    Raises:
        MismatchError: the next text is malformed, or ends early; the cursor is after the text that was given.
    """
    cursor.position += 1
    give("{")
    separator = ""
    while True:
        yield from cursor.space()
        if (yield from cursor.optional(")")):
            give("}")
            return
        key = yield from read_whole(cursor, _read_key(cursor, "="))
        give(f'{separator}"{string_text(key)}": ')
        yield from _pass_value(cursor, give)
        yield from cursor.space()
        separator = ", "
        if not (yield from cursor.optional(",")) and (yield from cursor.peek()) != ")":
            raise MismatchError


def _pass_value(cursor: Cursor, give: Give) -> Reading[None]:
    """Read one value, a tuple as a list; raises as `_pass_arguments`."""
    closers: list[str] = []
    while True:
        cursor.release()
        yield from cursor.space()
        char = yield from cursor.peek()
        if char in _CLOSERS:
            cursor.position += 1
            give("{" if char == "{" else "[")
            closers.append(_CLOSERS[char])
            yield from cursor.space()
            if (yield from cursor.peek()) != closers[-1]:
                yield from _pass_key(cursor, give, closers[-1], "")
                continue  # a value follows
        else:
            yield from _pass_scalar(cursor, give)
        while closers:
            yield from cursor.space()
            char = yield from cursor.peek()
            if char == closers[-1]:
                cursor.position += 1
                give("}" if closers.pop() == "}" else "]")
            elif char == ",":
                cursor.position += 1
                yield from cursor.space()
                if (yield from cursor.peek()) == closers[-1]:
                    continue  # Python allows a comma before the end
                yield from _pass_key(cursor, give, closers[-1], ", ")
                break
            else:
                raise MismatchError
        else:
            return


def _pass_key(cursor: Cursor, give: Give, closer: str, separator: str) -> Reading[None]:
    """Read a key and its colon within a mapping, and nothing elsewhere; a separator is given before it.

    A malformed key stays unread.
    """
    if closer != "}":
        give(separator)
        return
    key = yield from read_whole(cursor, _read_key(cursor, ":"))
    give(f'{separator}"{string_text(key)}": ')


def _read_key(cursor: Cursor, end: str) -> Reading[str]:
    """Read a key and what ends it."""
    quote = yield from cursor.one_of(("'", '"'))
    key = (yield from cursor.until(quote, _KEY_LIMIT)) if quote else (yield from cursor.match(_KEY))
    yield from cursor.space()
    yield from cursor.expect(end)
    if not key:
        raise MismatchError
    return key


def _pass_scalar(cursor: Cursor, give: Give) -> Reading[None]:
    quote = yield from cursor.one_of(("'", '"'))
    if quote:
        yield from _pass_text(cursor, give, quote)
        return
    yield from pass_bare_value(cursor, _BARE_ENDS, give)


def _pass_text(cursor: Cursor, give: Give, quote: str) -> Reading[None]:
    """Read a text behind its first quote as it arrives."""
    give('"')
    while found := (yield from pass_until(cursor, (quote, "\\"), lambda text: give(string_text(text)))):
        if found == "\\":
            yield from _pass_escape(cursor, give)
            continue
        cursor.position += 1
        if (yield from _is_end(cursor)):
            give('"')
            return
        give(string_text(quote))
    raise MismatchError


def _is_end(cursor: Cursor) -> Reading[bool]:
    """True if what comes behind a quote, which stays unread, cannot be the same text."""
    place = cursor.position
    while True:
        while place < len(cursor.text) and cursor.text[place] in _SPACES:
            place += 1
        if place < len(cursor.text):
            return cursor.text[place] in _BEHIND_TEXT or cursor.text.startswith("<|", place)
        if not (yield from cursor.more()):
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
    """Wait for so many characters from the position on, or the end."""
    while len(cursor.text) - cursor.position < size:
        if not (yield from cursor.more()):
            return


PYTHONIC = ToolStyle(
    "lfm2",
    _read_calls,
    long_id,
    CallForm("", "(", ")", first=f"{LFM2_CALLS}[", between=", ", last=f"]{LFM2_CALLS_END}"),
    marks=(LFM2_CALLS,),
    arguments=PythonicRules(),
)
