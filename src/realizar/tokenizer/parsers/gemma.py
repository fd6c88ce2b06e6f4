"""Calls of Gemma 4: `call:name{key:<|"|>text<|"|>,other:1}`, passed on as JSON. Standard library only."""

from __future__ import annotations

import re

from realizar.tokenizer.marks import GEMMA_CALL, GEMMA_CALL_END, GEMMA_QUOTE
from realizar.tokenizer.parsers.argument_types import pass_bare_value, string_text
from realizar.tokenizer.parsers.calls import Calls, read_arguments
from realizar.tokenizer.parsers.cursor import Cursor, Give, MismatchError, Reading, pass_until, read_whole
from realizar.tokenizer.parsers.gemma_grammar import GemmaRules
from realizar.tokenizer.parsers.json_text import pass_string, read_string
from realizar.tokenizer.parsers.styles import CallForm, ToolStyle, long_id

_CALL = "call:"
_KEY_LIMIT = 256
_NAME = re.compile(r"[\w.:/-]*")
# A bare value ends at one of these, which are not part of it.
_BARE_ENDS = (",", "}", "]", GEMMA_CALL_END)


def _read_gemma(cursor: Cursor, calls: Calls, mark: str) -> Reading[None]:
    yield from cursor.space()
    yield from cursor.expect(_CALL)
    name = yield from cursor.match(_NAME)
    yield from read_arguments(cursor, calls, name, (GEMMA_CALL_END,), _pass_value)
    yield from cursor.space()
    yield from cursor.optional(GEMMA_CALL_END)
    cursor.save()


def _pass_value(cursor: Cursor, give: Give) -> Reading[None]:
    """Read one value; `give` gets its JSON as it arrives.

    Raises:
        MismatchError: the next text is malformed, or ends early; the cursor is after the text that was given.
    """
    closers: list[str] = []
    while True:
        cursor.release()
        yield from cursor.space()
        char = yield from cursor.peek()
        if char in ("{", "["):
            cursor.position += 1
            give(char)
            closers.append("}" if char == "{" else "]")
            yield from cursor.space()
            if (yield from cursor.peek()) != closers[-1]:
                yield from _pass_key(cursor, give, closers[-1])
                continue  # a value follows
        else:
            yield from _pass_scalar(cursor, give)
        while closers:
            yield from cursor.space()
            char = yield from cursor.peek()
            if char == closers[-1]:
                cursor.position += 1
                give(closers.pop())
            elif char == ",":
                cursor.position += 1
                give(", ")
                yield from cursor.space()
                yield from _pass_key(cursor, give, closers[-1])
                break
            else:
                raise MismatchError
        else:
            return


def _pass_key(cursor: Cursor, give: Give, closer: str) -> Reading[None]:
    """Read a key and its colon, within an object. A malformed key stays unread."""
    if closer == "}":
        key = yield from read_whole(cursor, _read_key(cursor))
        give(f'"{string_text(key)}": ')


def _read_key(cursor: Cursor) -> Reading[str]:
    if (yield from cursor.optional(GEMMA_QUOTE)):
        key = yield from cursor.until(GEMMA_QUOTE, _KEY_LIMIT)
    elif (yield from cursor.peek()) == '"':
        key = yield from read_string(cursor)
    else:
        return (yield from cursor.until(":", _KEY_LIMIT)).strip()
    yield from cursor.space()
    yield from cursor.expect(":")
    return key


def _pass_scalar(cursor: Cursor, give: Give) -> Reading[None]:
    if (yield from cursor.optional(GEMMA_QUOTE)):
        give('"')
        if not (yield from pass_until(cursor, (GEMMA_QUOTE,), lambda text: give(string_text(text)))):
            raise MismatchError
        cursor.position += len(GEMMA_QUOTE)
        give('"')
        return
    if (yield from cursor.peek()) == '"':
        yield from pass_string(cursor, give)
        return
    yield from pass_bare_value(cursor, _BARE_ENDS, give)


GEMMA = ToolStyle(
    "gemma4",
    _read_gemma,
    long_id,
    CallForm(f"{GEMMA_CALL}{_CALL}", "", GEMMA_CALL_END),
    marks=(GEMMA_CALL,),
    arguments=GemmaRules(),
)
