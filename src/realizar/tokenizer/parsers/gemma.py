"""Calls of Gemma 4: `call:name{key:<|"|>text<|"|>,other:1}`, passed on as JSON. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from realizar.tokenizer.marks import GEMMA_CALL, GEMMA_CALL_END, GEMMA_QUOTE
from realizar.tokenizer.parsers.argument_types import pass_bare_value, string_text
from realizar.tokenizer.parsers.calls import Calls, read_arguments
from realizar.tokenizer.parsers.cursor import Cursor, Give, MismatchError, Reading, read_whole
from realizar.tokenizer.parsers.gemma_grammar import GemmaRules
from realizar.tokenizer.parsers.json_text import pass_string, read_string
from realizar.tokenizer.parsers.quoted_text import ends_calls, pass_quoted
from realizar.tokenizer.parsers.styles import CallForm, ToolStyle, long_id

_CALL = "call:"
_KEY_LIMIT = 256
_NAME = re.compile(r"[\w.:/-]*")
# A bare value ends at one of these, which are not part of it.
_BARE_ENDS = (",", "}", "]", GEMMA_QUOTE, GEMMA_CALL_END)
_BARE = re.compile(r"[^:,{}\[\]<\"']*")


@dataclass(slots=True)
class _Bracket:
    """An open object or list: what closes it, and the keys that it has."""

    closer: str
    keys: set[str] = field(default_factory=set)


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
    brackets: list[_Bracket] = []
    while True:
        cursor.release()
        yield from cursor.space()
        char = yield from cursor.peek()
        if char in ("{", "["):
            cursor.position += 1
            give(char)
            brackets.append(_Bracket("}" if char == "{" else "]"))
            yield from cursor.space()
            if (yield from cursor.peek()) != brackets[-1].closer:
                yield from _pass_key(cursor, give, brackets[-1])
                continue  # a value follows
        else:
            yield from _pass_scalar(cursor, give, brackets)
        while brackets:
            yield from cursor.space()
            char = yield from cursor.peek()
            if char == brackets[-1].closer:
                cursor.position += 1
                give(brackets.pop().closer)
            elif char == ",":
                cursor.position += 1
                give(", ")
                yield from cursor.space()
                yield from _pass_key(cursor, give, brackets[-1])
                break
            else:
                raise MismatchError
        else:
            return


def _pass_key(cursor: Cursor, give: Give, bracket: _Bracket) -> Reading[None]:
    """Read a key and its colon, within an object. A malformed key stays unread."""
    if bracket.closer == "}":
        key = yield from read_whole(cursor, _read_key(cursor, bracket))
        bracket.keys.add(key)
        give(f'"{string_text(key)}": ')


def _read_key(cursor: Cursor, bracket: _Bracket) -> Reading[str]:
    """Read a key and its colon; a key that was given before does not match, as one of the two would be lost."""
    quote = yield from cursor.one_of((GEMMA_QUOTE, "'"))
    if quote:
        key = yield from cursor.until(quote, _KEY_LIMIT)
    elif (yield from cursor.peek()) == '"':
        key = yield from read_string(cursor)
    else:
        key = (yield from cursor.match(_BARE)).strip()
    yield from cursor.space()
    yield from cursor.expect(":")
    if key in bracket.keys:
        raise MismatchError
    return key


def _pass_scalar(cursor: Cursor, give: Give, brackets: Sequence[_Bracket]) -> Reading[None]:
    quote = yield from cursor.one_of((GEMMA_QUOTE, "'"))
    if quote:  # models write Python's quotes too
        yield from pass_quoted(cursor, give, quote, lambda behind: _is_end(behind, brackets), escaped=quote == "'")
    elif (yield from cursor.peek()) == '"':
        yield from pass_string(cursor, give)
    else:
        yield from pass_bare_value(cursor, _BARE_ENDS, give)


def _is_end(cursor: Cursor, brackets: Sequence[_Bracket]) -> Reading[bool]:
    """True if what comes behind a quote can't be the same text: the call goes on there, or it is over."""
    yield from cursor.space()
    if (yield from cursor.peek()) in ("", GEMMA_CALL_END[0]):
        return (yield from ends_calls(cursor, GEMMA_CALL, GEMMA_CALL_END, _begins_call))
    for depth in range(len(brackets), 0, -1):
        bracket = brackets[depth - 1]
        if (yield from cursor.optional(",")):
            yield from cursor.space()
            if bracket.closer == "}":
                yield from _read_key(cursor, bracket)
                return True
            if (yield from cursor.one_of((GEMMA_QUOTE, "'", '"', "{", "["))):
                return True
            yield from cursor.match(_BARE)
            return (yield from cursor.one_of((",", bracket.closer))) != ""
        if not (yield from cursor.optional(bracket.closer)):
            return False
        yield from cursor.space()
    return (yield from ends_calls(cursor, GEMMA_CALL, GEMMA_CALL_END, _begins_call))


def _begins_call(cursor: Cursor) -> Reading[bool]:
    yield from cursor.space()
    return (yield from cursor.optional(_CALL)) and bool((yield from cursor.match(_NAME)))


GEMMA = ToolStyle(
    "gemma4",
    _read_gemma,
    long_id,
    CallForm(f"{GEMMA_CALL}{_CALL}", "", GEMMA_CALL_END),
    marks=(GEMMA_CALL,),
    arguments=GemmaRules(),
)
