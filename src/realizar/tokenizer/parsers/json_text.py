"""JSON in arriving text: a value's text is passed on while it is checked character by character.

The check follows RFC 8259, so that every value that is passed on whole can be parsed. Models also write line breaks and
tabs into strings as they are: those are passed on as escapes. Standard library only.
"""

from __future__ import annotations

import json
import re
from typing import Any

from realizar.tokenizer.parsers.argument_types import string_text
from realizar.tokenizer.parsers.cursor import Cursor, Give, MismatchError, Reading

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_CONTROL = re.compile(r"[\x00-\x1f]+")
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_HEX = frozenset("0123456789abcdefABCDEF")


def pass_value(cursor: Cursor, give: Give) -> Reading[None]:
    """Read one JSON value; `give` gets its text, with the white space before it, as it arrives.

    Raises MismatchError: the next text is not JSON, ends early, or is undecided and too long; the cursor is after the
    text that was given.
    """
    closers: list[str] = []
    while True:
        cursor.release()
        if (yield from _open_or_pass(cursor, give, closers)):
            continue  # a bracket was opened and a value stands in it
        while closers:
            cursor.check_bound()
            give((yield from cursor.space()))
            if (yield from _taken(cursor, closers[-1], give)):
                closers.pop()
                continue
            if not (yield from _taken(cursor, ",", give)):
                raise MismatchError
            if closers[-1] == "}":
                yield from _pass_key(cursor, give)
            break
        else:
            return


def _open_or_pass(cursor: Cursor, give: Give, closers: list[str]) -> Reading[bool]:
    """Read an opening bracket, or a whole value: a scalar, a string or empty brackets. True for an opening bracket."""
    give((yield from cursor.space()))
    char = yield from cursor.peek()
    if char == '"':
        yield from pass_string(cursor, give)
        return False
    if char not in ("{", "["):
        yield from _pass_scalar(cursor, give)
        return False
    yield from _taken(cursor, char, give)
    closer = "}" if char == "{" else "]"
    give((yield from cursor.space()))
    if (yield from _taken(cursor, closer, give)):
        return False
    closers.append(closer)
    if char == "{":
        yield from _pass_key(cursor, give)
    return True


def _pass_key(cursor: Cursor, give: Give) -> Reading[None]:
    give((yield from cursor.space()))
    yield from pass_string(cursor, give)
    give((yield from cursor.space()))
    if not (yield from _taken(cursor, ":", give)):
        raise MismatchError


def _taken(cursor: Cursor, char: str, give: Give) -> Reading[bool]:
    if (yield from cursor.peek()) != char:
        return False
    cursor.position += 1
    give(char)
    return True


def _pass_scalar(cursor: Cursor, give: Give) -> Reading[None]:
    start = cursor.position
    word = yield from cursor.match(_WORD)
    if not _SCALAR.fullmatch(word):
        cursor.position = start
        raise MismatchError
    give(word)


def pass_string(cursor: Cursor, give: Give) -> Reading[None]:
    """Read a JSON string with its quotes; `give` gets its text as it arrives, with control characters as escapes.

    Raises MismatchError where the next text is none, or ends early; the cursor is after the text that was given.
    """
    if not (yield from _taken(cursor, '"', give)):
        raise MismatchError
    while not (yield from _taken(cursor, '"', give)):
        cursor.release()
        cursor.check_bound()
        char = yield from cursor.peek()
        if char == "\\":
            yield from _pass_escape(cursor, give)
        elif found := _PLAIN.match(cursor.text, cursor.position, cursor.bound):
            cursor.position = found.end()
            give(found.group())
        elif found := _CONTROL.match(cursor.text, cursor.position, cursor.bound):
            cursor.position = found.end()
            give(string_text(found.group()))
        else:
            raise MismatchError  # the end


def _pass_escape(cursor: Cursor, give: Give) -> Reading[None]:
    start = cursor.position
    size = 2
    while True:
        escape = cursor.text[start : start + size]
        if escape[1:2] == "u":
            size = 6
            escape = cursor.text[start : start + size]
        if len(escape) == size or not (yield from cursor.more()):
            break
    if len(escape) < size or not (escape[1] in '"\\/bfnrt' or (escape[1] == "u" and _HEX.issuperset(escape[2:]))):
        raise MismatchError
    cursor.position += size
    give(escape)


def read_string(cursor: Cursor) -> Reading[str]:
    """Read a JSON string and decode it; MismatchError where the next text is none, or ends early."""
    texts: list[str] = []
    yield from pass_string(cursor, texts.append)
    decoded: str = json.loads("".join(texts))
    return decoded


def object_text(text: str) -> str | None:
    """A JSON object's text, in characters that UTF-8 can express; None if the text is not an object."""
    try:
        value: Any = json.loads(text)
    except RecursionError:
        return None
    except ValueError:
        try:
            value = json.loads(text, strict=False)  # control characters within strings
        except (ValueError, RecursionError):
            return None
        text = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict):
        return None
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value)  # lone surrogates stay escapes
    return text
