"""Calls written as in Python, `[name(key='text', other=1)]` (LFM2), passed on as JSON. Standard library only."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from realizar.tokenizer.marks import LFM2_CALLS, LFM2_CALLS_END
from realizar.tokenizer.parsers.argument_types import pass_bare_value, string_text
from realizar.tokenizer.parsers.calls import Calls, read_arguments
from realizar.tokenizer.parsers.cursor import NAME, NAME_LIMIT, Cursor, Give, MismatchError, Reading, read_whole
from realizar.tokenizer.parsers.grammar_rules import ANYTHING, KEY, json_rule, member_rules, members, part_of
from realizar.tokenizer.parsers.json_text import Bracket, pass_nested
from realizar.tokenizer.parsers.quoted_text import QuoteEnds, ends_calls, pass_quoted
from realizar.tokenizer.parsers.styles import CallForm, ToolStyle

# Rules of arguments written as in Python, for grammars that force calls. Standard library only.
#
# Values are JSON there, which the parser reads as well as Python's own: both write texts between double quotes.


def _pythonic_rules(rule: str, parameters: Mapping[str, Any], strict: bool, literal: Callable[[str], str]) -> list[str]:
    """The arguments by name, in the schema's order."""
    found = members(parameters, strict)
    if not found:
        if not parameters.get("additionalProperties"):
            return [f'{rule}: ""']
        pair = f'{rule}_pair: {KEY} "=" {rule}_any'
        return [f'{rule}: ({rule}_pair (", " {rule}_pair)*)?', pair, json_rule(f"{rule}_any", ANYTHING, strict)]
    written = [f"{rule}: {rule}_head_0"]
    for place, (key, schema, required) in enumerate(found):
        written.append(json_rule(f"{rule}_{place}_value", part_of(schema, parameters), strict))
        member = f"{literal(key + '=')} {rule}_{place}_value"
        written += member_rules(rule, place, len(found), member, ", ", required=required)
    return written


_KEY = re.compile(r"[\w-]*")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_BARE_ENDS = (",", ")", "]", "}", LFM2_CALLS_END)  # a bare value ends at one of these, which are not part of it


def _read_calls(cursor: Cursor, calls: Calls, mark: str) -> Reading[None]:
    yield from cursor.space()
    yield from cursor.optional("[")
    while True:
        yield from cursor.space()
        name = yield from cursor.match(NAME)
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

    Raises MismatchError where the next text is malformed, or ends early; the cursor is after the text that was given.
    """
    cursor.position += 1
    give("{")
    separator = ""
    given = set[str]()
    while True:
        yield from cursor.space()
        if (yield from cursor.optional(")")):
            give("}")
            return
        key = yield from read_whole(cursor, _read_key(cursor, "=", given))
        given.add(key)
        give(f'{separator}"{string_text(key)}": ')
        scalar = functools.partial(_pass_scalar, given=given)
        yield from pass_nested(cursor, give, _CLOSERS, _pass_key, scalar, may_end_in_comma=True)
        yield from cursor.space()
        separator = ", "
        if not (yield from cursor.optional(",")) and (yield from cursor.peek()) != ")":
            raise MismatchError


def _pass_key(cursor: Cursor, give: Give, _bracket: Bracket) -> Reading[None]:
    """Read a key and its colon. A malformed key stays unread."""
    key = yield from read_whole(cursor, _read_key(cursor, ":"))
    give(f'"{string_text(key)}": ')


def _read_key(cursor: Cursor, end: str, given: Collection[str] = ()) -> Reading[str]:
    """Read a key and what ends it; a key that was given before does not match, as one of the two would be lost."""
    quote = yield from cursor.one_of(("'", '"'))
    key = (yield from cursor.until(quote, NAME_LIMIT)) if quote else (yield from cursor.match(_KEY))
    yield from cursor.space()
    yield from cursor.expect(end)
    if not key or key in given:
        raise MismatchError
    return key


def _pass_scalar(cursor: Cursor, give: Give, brackets: Sequence[Bracket], *, given: Collection[str]) -> Reading[None]:
    """Read a value without brackets of the last of the given arguments."""
    closers = [bracket.closer for bracket in brackets]
    quote = yield from cursor.one_of(("'", '"'))
    if quote:
        ends = QuoteEnds(
            lambda behind: _is_end(behind, closers, given),
            (*reversed(closers), ")", "]"),
            (LFM2_CALLS, LFM2_CALLS_END),
        )
        yield from pass_quoted(cursor, give, quote, ends)
        return
    yield from pass_bare_value(cursor, _BARE_ENDS, give)


def _is_end(cursor: Cursor, closers: Sequence[str], given: Collection[str]) -> Reading[bool]:
    """True if what comes behind a quote can't be the same text: the call goes on there, or it is over."""
    yield from cursor.space()
    if (yield from cursor.peek()) in ("", LFM2_CALLS_END[0]):
        return (yield from ends_calls(cursor, LFM2_CALLS, LFM2_CALLS_END, _begins_call))
    if closers:
        return (yield from cursor.one_of((",", closers[-1]))) != ""
    if (yield from cursor.optional(",")):
        yield from cursor.space()
        if (yield from cursor.peek()) != ")":
            yield from _read_key(cursor, "=", given)
            return True
    if not (yield from cursor.optional(")")):
        return False
    yield from cursor.space()
    if (yield from cursor.optional(",")):
        return (yield from _begins_call(cursor))
    yield from cursor.optional("]")
    return (yield from ends_calls(cursor, LFM2_CALLS, LFM2_CALLS_END, _begins_call))


def _begins_call(cursor: Cursor) -> Reading[bool]:
    yield from cursor.space()
    yield from cursor.optional("[")
    return bool((yield from cursor.match(NAME))) and (yield from cursor.optional("("))


PYTHONIC = ToolStyle(
    "lfm2",
    _read_calls,
    CallForm("", "(", ")", first=f"{LFM2_CALLS}[", between=", ", last=f"]{LFM2_CALLS_END}"),
    marks=(LFM2_CALLS,),
    arguments=_pythonic_rules,
)
