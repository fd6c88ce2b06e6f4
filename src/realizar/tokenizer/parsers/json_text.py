"""JSON in arriving text: a value's text is passed on while it is checked character by character.

The check follows RFC 8259, so that every value that is passed on whole can be parsed. Models also write line breaks and
tabs into strings as they are: those are passed on as escapes. Standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from realizar.tokenizer.parsers.argument_types import string_text
from realizar.tokenizer.parsers.cursor import Cursor, Give, MismatchError, Reading

_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_CONTROL = re.compile(r"[\x00-\x1f]+")
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_ESCAPE = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGIN = re.compile(r"\\(u[0-9a-fA-F]{0,3})?")


@dataclass(slots=True)
class Bracket:
    """An open bracket: what closes it, and the keys that were read in it."""

    closer: str
    keys: set[str] = field(default_factory=set)


PassKey = Callable[[Cursor, Give, Bracket], Reading[None]]
PassScalar = Callable[[Cursor, Give, Sequence[Bracket]], Reading[None]]


def pass_value(cursor: Cursor, give: Give) -> Reading[None]:
    """Read one JSON value; `give` gets its text, with the white space before it, as it arrives.

    Raises MismatchError: the next text is not JSON, ends early, or is undecided and too long; the cursor is after the
    text that was given.
    """
    yield from pass_nested(cursor, give, {"{": "}", "[": "]"}, _pass_key, _pass_scalar, as_written=True)


def pass_nested(
    cursor: Cursor,
    give: Give,
    closers: Mapping[str, str],
    pass_key: PassKey,
    pass_scalar: PassScalar,
    *,
    as_written: bool = False,
    may_end_in_comma: bool = False,
) -> Reading[None]:
    """Read one value, with what stands between its brackets; `give` gets its JSON as it arrives.

    Args:
        closers: what closes each bracket: a mapping's is "}", and the others are lists.
        pass_key: reads a key of a mapping and what stands behind it, and gives its JSON.
        pass_scalar: reads a value without brackets within those that are open.
        as_written: white space and commas are given as they are.
        may_end_in_comma: as in Python.

    Raises MismatchError as `pass_value` does.
    """
    brackets: list[Bracket] = []
    while True:
        cursor.release()
        yield from _pass_space(cursor, give, as_written)
        closer = closers.get((yield from cursor.peek()))
        if closer is not None:
            cursor.position += 1
            brackets.append(Bracket(closer))
            give("{" if closer == "}" else "[")
            yield from _pass_space(cursor, give, as_written)
            if (yield from cursor.peek()) != closer:
                if closer == "}":
                    yield from pass_key(cursor, give, brackets[-1])
                continue  # a value follows
        else:
            yield from pass_scalar(cursor, give, brackets)
        while brackets:
            cursor.check_bound()
            yield from _pass_space(cursor, give, as_written)
            closer = brackets[-1].closer
            if (yield from cursor.optional(closer)):
                give("}" if brackets.pop().closer == "}" else "]")
                continue
            yield from cursor.expect(",")
            give("," if as_written else "")
            yield from _pass_space(cursor, give, as_written)
            if may_end_in_comma and (yield from cursor.peek()) == closer:
                continue
            give("" if as_written else ", ")
            if closer == "}":
                yield from pass_key(cursor, give, brackets[-1])
            break
        else:
            return


def _pass_space(cursor: Cursor, give: Give, as_written: bool) -> Reading[None]:
    space = yield from cursor.space()
    if as_written:
        give(space)


def _pass_key(cursor: Cursor, give: Give, _bracket: Bracket) -> Reading[None]:
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


def _pass_scalar(cursor: Cursor, give: Give, _brackets: Sequence[Bracket]) -> Reading[None]:
    if (yield from cursor.peek()) == '"':
        yield from pass_string(cursor, give)
        return
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
    while (found := _ESCAPE.match(cursor.text, cursor.position)) is None:
        if not _ESCAPE_BEGIN.fullmatch(cursor.text, cursor.position) or not (yield from cursor.more()):
            raise MismatchError
    cursor.position = found.end()
    give(found.group())


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
