"""Calls of Gemma 4: `call:name{key:<|"|>text<|"|>,other:1}`, passed on as JSON. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from realizar.tokenizer.marks import GEMMA_CALL, GEMMA_CALL_END, GEMMA_QUOTE
from realizar.tokenizer.parsers.argument_types import ALL_TYPES, pass_bare_value, resolve, string_text, types_of
from realizar.tokenizer.parsers.calls import Calls, read_arguments
from realizar.tokenizer.parsers.cursor import NAME, NAME_LIMIT, Cursor, Give, MismatchError, Reading, read_whole
from realizar.tokenizer.parsers.grammar_rules import (
    ANY_TEXT,
    ANYTHING,
    KEY,
    allowed_values,
    check_keywords,
    check_text,
    json_rule,
    member_rules,
    members,
    part_of,
    refuse,
)
from realizar.tokenizer.parsers.json_text import Bracket, pass_nested, pass_string, read_string
from realizar.tokenizer.parsers.quoted_text import QuoteEnds, ends_calls, pass_quoted
from realizar.tokenizer.parsers.styles import CallForm, ToolStyle

# Rules of arguments in Gemma 4's notation, for grammars that force calls.

_MAX_DEPTH = 32
_LIST_KEYWORDS = ("minItems", "maxItems", "uniqueItems", "prefixItems", "contains")


def _gemma_rules(rule: str, parameters: Mapping[str, Any], strict: bool, literal: Callable[[str], str]) -> list[str]:
    """The arguments of Gemma 4's calls: members by name, as its template writes them."""
    writer = _Writer(rule, parameters, strict, literal)
    writer.object_rule(rule, parameters)
    return writer.written


@dataclass(slots=True)
class _Writer:
    first: str
    root: Mapping[str, Any]
    strict: bool
    literal: Callable[[str], str]
    written: list[str] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)  # rules by the schema that they are of, as schemas may recur
    nested: list[str] = field(default_factory=list)  # the rules that are being written
    any_rule: str = ""

    def object_rule(self, rule: str, schema: Mapping[str, Any]) -> None:
        """Write the rule of an object: its required members, and any of the others."""
        found = sorted(members(schema, self.strict), key=lambda member: member[0].lower())
        if not found and schema.get("additionalProperties", schema is not self.root) is not False:
            pair = f"{self._any()}_pair"
            self.written.append(f'{rule}: "{{" ({pair} ("," {pair})*)? "}}"')
            return
        self.written.append(f'{rule}: "{{" {rule}_head_0 "}}"' if found else f'{rule}: "{{"  "}}"')
        for place, (key, part, required) in enumerate(found):
            value = self._value_rule(f"{rule}_{place}", part)
            member = f"{self.literal(key + ':')} {value}"
            self.written += member_rules(rule, place, len(found), member, ",", required=required)

    def _value_rule(self, rule: str, schema: Any) -> str:
        part = part_of(schema, self.root)
        known = id(resolve(schema, self.root))
        if known in self.names:
            return self.names[known]
        if len(self.nested) >= _MAX_DEPTH:
            if self.strict:
                refuse(f"more than {_MAX_DEPTH} levels")
            return self._any()
        self.names[known] = rule
        self.nested.append(rule)
        self.written.append(f"{rule}: {' | '.join(self._ways(rule, part))}")
        self.nested.pop()
        return rule

    def _ways(self, rule: str, part: Mapping[str, Any]) -> list[str]:
        values = allowed_values(part)
        if values is not None:
            return [self.literal(gemma_text(value)) or '""' for value in values]
        for keyword in ("anyOf", "oneOf"):
            if isinstance(part.get(keyword), list) and part[keyword]:
                return [self._value_rule(f"{rule}_{place}", each) for place, each in enumerate(part[keyword])]
        types = types_of(part, self.root)
        if types == ALL_TYPES:
            return [self._any()]
        ways: list[str] = []
        if "string" in types:
            check_text(part, types & {"string"}, self.strict)
            ways.append(self._text(rule))
        if "null" in types:
            ways.append('"null"')
        if "boolean" in types:
            ways.append('"true" | "false"')
        if numbers := sorted(types & {"integer", "number"}):
            bounds = {key: part[key] for key in part if key in ("minimum", "maximum", "multipleOf")}
            exclusive = {key: part[key] for key in part if key.startswith("exclusive")}
            self.written.append(json_rule(f"{rule}_number", {"type": numbers[-1], **bounds, **exclusive}, self.strict))
            ways.append(f"{rule}_number")
        if "array" in types:
            ways.append(self._list(rule, part))
        if "object" in types:
            self.object_rule(f"{rule}_object", part)
            ways.append(f"{rule}_object")
        return ways

    def _list(self, rule: str, part: Mapping[str, Any]) -> str:
        check_keywords(part, _LIST_KEYWORDS, self.strict)
        item = self._value_rule(f"{rule}_item", part.get("items", ANYTHING))
        return f'"[" ({item} ("," {item})*)? "]"'

    def _text(self, rule: str) -> str:
        quote = self.literal(GEMMA_QUOTE)
        if quote.startswith("<["):
            return f"{quote} {ANY_TEXT} {quote}"
        self.written.append(f"{rule}_text[lazy]: {ANY_TEXT} {quote}")
        return f"{quote} {rule}_text"

    def _any(self) -> str:
        if not self.any_rule:
            rule = self.any_rule = f"{self.first}_any"
            text = self._text(rule)
            self.written += [
                json_rule(f"{rule}_number", {"type": "number"}, strict=False),
                f'{rule}: {text} | "true" | "false" | "null" | {rule}_number | {rule}_list | {rule}_map',
                f'{rule}_list: "[" ({rule} ("," {rule})*)? "]"',
                f'{rule}_map: "{{" ({rule}_pair ("," {rule}_pair)*)? "}}"',
                f'{rule}_pair: {KEY} ":" {rule}',
            ]
        return self.any_rule


def gemma_text(value: Any) -> str:
    if isinstance(value, str):
        return f"{GEMMA_QUOTE}{value}{GEMMA_QUOTE}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        pairs = sorted(value.items(), key=lambda pair: str(pair[0]).lower())
        return "{" + ",".join(f"{key}:{gemma_text(each)}" for key, each in pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma_text, value)) + "]"
    return str(value)


_CALL = "call:"
# A bare value ends at one of these, which are not part of it.
_BARE_ENDS = (",", "}", "]", GEMMA_QUOTE, GEMMA_CALL_END)
_BARE = re.compile(r"[^:,{}\[\]<\"']*")


def _read_gemma(cursor: Cursor, calls: Calls, mark: str) -> Reading[None]:
    yield from cursor.space()
    yield from cursor.expect(_CALL)
    name = yield from cursor.match(NAME)
    yield from read_arguments(cursor, calls, name, (GEMMA_CALL_END,), _pass_value)
    yield from cursor.space()
    yield from cursor.optional(GEMMA_CALL_END)
    cursor.save()


def _pass_value(cursor: Cursor, give: Give) -> Reading[None]:
    """Read one value; `give` gets its JSON as it arrives. MismatchError, the cursor after that: it is malformed."""
    yield from pass_nested(cursor, give, {"{": "}", "[": "]"}, _pass_key, _pass_scalar)


def _pass_key(cursor: Cursor, give: Give, bracket: Bracket) -> Reading[None]:
    """Read a key and its colon. A malformed key stays unread."""
    key = yield from read_whole(cursor, _read_key(cursor, bracket))
    bracket.keys.add(key)
    give(f'"{string_text(key)}": ')


def _read_key(cursor: Cursor, bracket: Bracket) -> Reading[str]:
    """Read a key and its colon; a key that was given before does not match, as one of the two would be lost."""
    quote = yield from cursor.one_of((GEMMA_QUOTE, "'"))
    if quote:
        key = yield from cursor.until(quote, NAME_LIMIT)
    elif (yield from cursor.peek()) == '"':
        key = yield from read_string(cursor)
    else:
        key = (yield from cursor.match(_BARE)).strip()
    yield from cursor.space()
    yield from cursor.expect(":")
    if key in bracket.keys:
        raise MismatchError
    return key


def _pass_scalar(cursor: Cursor, give: Give, brackets: Sequence[Bracket]) -> Reading[None]:
    quote = yield from cursor.one_of((GEMMA_QUOTE, "'"))
    if quote:  # models write Python's quotes too
        ends = QuoteEnds(
            lambda behind: _is_end(behind, brackets),
            [bracket.closer for bracket in reversed(brackets)],
            (GEMMA_CALL, GEMMA_CALL_END),
        )
        yield from pass_quoted(cursor, give, quote, ends, escaped=quote == "'")
    elif (yield from cursor.peek()) == '"':
        yield from pass_string(cursor, give)
    else:
        yield from pass_bare_value(cursor, _BARE_ENDS, give)


def _is_end(cursor: Cursor, brackets: Sequence[Bracket]) -> Reading[bool]:
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
    return (yield from cursor.optional(_CALL)) and bool((yield from cursor.match(NAME)))


GEMMA = ToolStyle(
    "gemma4",
    _read_gemma,
    CallForm(f"{GEMMA_CALL}{_CALL}", "", GEMMA_CALL_END),
    marks=(GEMMA_CALL,),
    arguments=_gemma_rules,
)
