"""Styles of tool calls with arguments between tags: GLM, Qwen3-Coder, Seed-OSS and MiniMax. Standard library only."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from realizar.tokenizer.marks import (
    GLM_KEY,
    GLM_KEY_END,
    GLM_VALUE,
    GLM_VALUE_END,
    HERMES_CALL,
    HERMES_CALL_END,
    MARKS,
    MINIMAX_CALLS,
    MINIMAX_CALLS_END,
    SEED_CALL,
    SEED_CALL_END,
)
from realizar.tokenizer.parsers.argument_types import STRING, string_text, types_of, value_text
from realizar.tokenizer.parsers.calls import Calls
from realizar.tokenizer.parsers.cursor import NAME, NAME_LIMIT, Cursor, Give, MismatchError, Reading, ahead, pass_until
from realizar.tokenizer.parsers.grammar_rules import (
    ANY_TEXT,
    KEY,
    allowed_values,
    check_text,
    json_rule,
    members,
    part_of,
    refuse,
)
from realizar.tokenizer.parsers.styles import CallForm, ToolStyle

# Calls whose arguments stand between tags, without quotes; their types come from the tool's schema.
#
# Nothing is escaped between tags, so a value may hold any of them, and models leave closing tags out. A value therefore
# ends only where the call goes on, with another argument, or ends; that is read ahead.

# Names of closing tags that are quoted rather than confused with the style's own.
_CLOSING = frozenset({"parameter", "function", "invoke", *(mark[2:-1] for mark in MARKS if mark.startswith("</"))})


@dataclass(frozen=True, slots=True)
class Tags:
    """The texts around a call's name, its arguments' names and their values.

    Attributes:
        mark, mark_end: texts around a call, or around several.
        name_start, name_end: texts around the call's name; empty if the name stands right behind the mark.
        end: text after the last argument; empty if the mark's end follows.
        line_end: text after `value_end` and, where there is one, before `value_start`.
        in_lines: a line break after `key_end` and one before `value_end` are not part of the value.
    """

    mark: str
    mark_end: str
    key_start: str
    key_end: str
    value_end: str
    value_start: str = ""
    name_start: str = ""
    name_end: str = ""
    end: str = ""
    line_end: str = "\n"
    in_lines: bool = False


def _read_tagged(tags: Tags, cursor: Cursor, calls: Calls, mark: str) -> Reading[None]:
    """Read the calls after a mark, up to and including its end.

    Arguments are emitted as JSON while they arrive: strings in parts, other values whole. Raises MismatchError: the
    next text is not a call, or no tool has its name; earlier calls are emitted and saved.
    """
    marked = mark == tags.mark
    if not marked:
        cursor.position -= len(mark)  # the call stands without the mark around it
    while True:
        yield from cursor.space()
        name = yield from _read_name(cursor, tags)
        calls.check_name(name)
        yield from cursor.space()
        yield from _Arguments(cursor, calls, tags, name, marked=marked).read()
        yield from cursor.space()
        if not tags.name_start or not (yield from _is_next(cursor, tags.name_start)):
            break
    yield from cursor.optional(tags.mark_end)
    cursor.save()


def _read_name(cursor: Cursor, tags: Tags) -> Reading[str]:
    if not tags.name_start:
        return (yield from cursor.match(NAME))
    yield from cursor.expect(tags.name_start)
    return (yield from cursor.until(tags.name_end, NAME_LIMIT)).strip()


def _is_next(cursor: Cursor, literal: str) -> Reading[bool]:
    found = yield from cursor.optional(literal)
    if found:
        cursor.position -= len(literal)
    return found


@functools.cache
def _key_pattern(key_end: str) -> re.Pattern[str]:
    return re.compile(rf"[^<>\n{re.escape(key_end[0])}]*")


class _Arguments:
    """Reads one call's arguments and, where a call has one, its end; `marked`: the call stands between marks."""

    def __init__(self, cursor: Cursor, calls: Calls, tags: Tags, name: str, *, marked: bool) -> None:
        self._cursor, self._calls, self._tags, self._name, self._marked = cursor, calls, tags, name, marked
        self._given = set[str]()  # arguments that were read
        self._opened = set[str]()  # names of tags that were opened within the value

    def read(self) -> Reading[None]:
        """Read all arguments. The JSON stays open where the answer ends in a value: a client must see that.

        Raises MismatchError where the next text is neither an argument nor the call's end; nothing has been emitted.
        """
        cursor, calls, tags = self._cursor, self._calls, self._tags
        key = ""
        if (yield from _is_next(cursor, tags.key_start)):
            key = yield from self._head()
        elif not (yield from _is_next(cursor, tags.mark_end)):
            yield from cursor.expect(tags.end or tags.mark_end)
            cursor.position -= len(tags.end)
        calls.open(self._name)
        cursor.undecided = False  # what has been emitted is not read again
        closed, separator = True, "{"
        while key:
            self._given.add(key)
            calls.give(f'{separator}"{string_text(key)}": ')
            closed, separator = (yield from self._value(key)), ", "
            yield from cursor.space()
            key = (yield from self._head()) if closed and (yield from _is_next(cursor, tags.key_start)) else ""
        if closed:
            calls.give("}" if self._given else "{}")
        if tags.end:
            yield from cursor.optional(tags.end)
        cursor.undecided = True
        cursor.save()
        calls.close()

    def _head(self) -> Reading[str]:
        """Read an argument's name and the tags around it, up to its value. The tag behind the name may be missing."""
        cursor, tags = self._cursor, self._tags
        yield from cursor.expect(tags.key_start)
        key = (yield from cursor.match(_key_pattern(tags.key_end))).strip()
        if tags.value_start:
            yield from cursor.space()
            yield from cursor.optional(tags.key_end)
            yield from cursor.space()
        yield from cursor.expect(tags.value_start or tags.key_end)
        if not key:
            raise MismatchError
        return key

    def _value(self, key: str) -> Reading[bool]:
        """Read a value and its closing tag; False if the answer ends in it. Strings are emitted as they arrive."""
        calls, types = self._calls, self._calls.types(self._name, key)
        if types == STRING:
            calls.give('"')
            closed = yield from self._text(lambda text: calls.give(string_text(text)))
            calls.give('"' if closed else "")
            return closed
        texts: list[str] = []
        closed = yield from self._text(texts.append)
        calls.give(value_text(calls.show("".join(texts)), types) if closed else "".join(texts))
        return closed

    def _text(self, give: Give) -> Reading[bool]:
        """Pass a value's text on as it arrives, without the line breaks that belong to tags; False as of `_value`."""
        cursor, tags = self._cursor, self._tags
        most = 2 if tags.in_lines else len(tags.line_end)
        held = ""  # line breaks that may stand before the end

        def pass_on(text: str) -> None:
            nonlocal held
            text = held + text
            size = min(len(text) - len(text.rstrip("\n")), most)
            held = text[len(text) - size :]
            give(text[: len(text) - size])

        self._opened.clear()
        if tags.in_lines:
            yield from cursor.optional("\n")
        while (yield from pass_until(cursor, ("<",), pass_on)):
            cursor.release()
            size = yield from ahead(cursor, self._closing())
            if size is not None:
                cursor.position += size
                give(held.removesuffix("\n" if tags.in_lines else "") if size else "")
                return True
            cursor.position += 1
            name = yield from cursor.match(NAME)
            self._opened.add(name)
            pass_on(f"<{name}")
        give(held)
        return False

    def _closing(self) -> Reading[int]:
        """Characters of the closing tag that ends the value, 0 if it is missing; MismatchError: the value goes on."""
        cursor, tags = self._cursor, self._tags
        start = cursor.position
        is_own = yield from cursor.optional(tags.value_end)
        if not is_own and not (yield from self._is_tag()):
            yield from self._other_closing_tag()
        size = cursor.position - start
        if size:
            yield from cursor.space()
        elif not self._may_stand_alone():
            raise MismatchError
        if (yield from _is_next(cursor, tags.key_start)):
            key = yield from self._head()
            if key in self._given or not (is_own or (yield from self._is_meant(key))):
                raise MismatchError
        elif not (yield from self._call_ends(closed=size > 0)):
            raise MismatchError
        return size

    def _is_tag(self) -> Reading[bool]:
        """True if another of the style's own tags comes next."""
        for tag in (self._tags.key_start, self._tags.end, self._tags.mark_end, self._tags.mark):
            if tag and (yield from _is_next(self._cursor, tag)):
                return True
        return False

    def _other_closing_tag(self) -> Reading[None]:
        """Read a closing tag of another name in its place, unless the value has its opening tag, or it is a mark."""
        cursor, tags = self._cursor, self._tags
        begins_line = cursor.text[cursor.position - 1] == "\n"
        yield from cursor.expect("</")
        name = yield from cursor.match(NAME)
        yield from cursor.expect(">")
        gap = yield from cursor.space()
        if not name or name in self._opened or (not begins_line if tags.in_lines else name in _CLOSING):
            raise MismatchError
        if gap != tags.line_end:
            raise MismatchError
        cursor.position -= len(gap)

    def _may_stand_alone(self) -> bool:
        """True if the next tag may end a value without a closing tag before it: it is a token, or where tags belong."""
        cursor, tags = self._cursor, self._tags
        if not tags.line_end or tags.value_start or cursor.text[cursor.position - 1] == "\n":
            return True
        marks = cursor.tokens.intersection((tags.mark, tags.mark_end))
        return cursor.text.startswith(tuple(marks), cursor.position)

    def _is_meant(self, key: str) -> Reading[bool]:
        """True if an argument whose tag lacks a closing tag before it is no part of a value: it does not come later."""
        cursor, tags = self._cursor, self._tags
        if not self._calls.expects(self._name, key):
            return False
        head = f"{tags.key_start}{key}{tags.key_end}"
        ends = tuple(filter(None, (tags.end, tags.mark_end, tags.mark)))
        return (yield from cursor.next_of((head, *ends))) != head

    def _call_ends(self, *, closed: bool) -> Reading[bool]:
        """True if the call is over here: the answer's end, another call, or tags that end it.

        Tags that are no tokens may be quoted, so words behind them belong to the value where another end follows them.
        """
        cursor, tags = self._cursor, self._tags
        if not (yield from cursor.peek()):
            return True
        whole = closed
        if tags.end:
            whole = (yield from cursor.optional(tags.end)) and closed
            yield from cursor.space()
        if self._marked:
            if (yield from cursor.optional(tags.mark_end)):
                if tags.mark_end in cursor.tokens:
                    return True
                yield from cursor.space()
            else:
                whole = False
        if not (yield from cursor.peek()) or (yield from self._call_begins()):
            return True
        if not whole:
            return False
        end = tags.mark_end if self._marked else tags.end
        while found := (yield from cursor.next_of((tags.mark, end))):
            cursor.position -= len(found)
            if found == end or (yield from self._call_begins()):
                return found != end
        return True

    def _call_begins(self) -> Reading[bool]:
        """True if the call of a tool comes next. The cursor may have moved."""
        cursor, tags = self._cursor, self._tags
        marked = yield from cursor.optional(tags.mark)
        if marked and tags.mark in cursor.tokens:
            return True
        yield from cursor.space()
        if not marked and not (tags.name_start and (yield from _is_next(cursor, tags.name_start))):
            return False
        return self._calls.has((yield from _read_name(cursor, tags)))


_GLM_TAGS = Tags(HERMES_CALL, HERMES_CALL_END, GLM_KEY, GLM_KEY_END, GLM_VALUE_END, value_start=GLM_VALUE)
_DENSE_TAGS = replace(_GLM_TAGS, line_end="")
_SEED_TAGS = Tags(
    SEED_CALL,
    SEED_CALL_END,
    "<parameter=",
    ">",
    "</parameter>",
    name_start="<function=",
    name_end=">",
    end="</function>",
)
_QWEN_TAGS = replace(_SEED_TAGS, mark=HERMES_CALL, mark_end=HERMES_CALL_END, in_lines=True)
_MINIMAX_TAGS = Tags(
    MINIMAX_CALLS,
    MINIMAX_CALLS_END,
    '<parameter name="',
    '">',
    "</parameter>",
    name_start='<invoke name="',
    name_end='">',
    end="</invoke>",
)


_EMPTY = '""'


@dataclass(frozen=True, slots=True)
class _TaggedRules:
    """The arguments of a style with tags; they come in the schema's order."""

    tags: Tags

    def rules(self, rule: str, parameters: Mapping[str, Any], strict: bool, literal: Callable[[str], str]) -> list[str]:
        parts: list[str] = []
        rules: list[str] = []
        for place, (key, schema, required) in enumerate(members(parameters, strict)):
            name = f"{rule}_{place}"
            parts.append(name if required else f"{name}?")
            rules.append(f"{name}: {literal(self.tags.key_start + key + self._head_end)} {name}_value")
            rules += self._value(f"{name}_value", schema, parameters, strict, literal)
        if not parts and parameters.get("additionalProperties"):
            name = f"{rule}_any"
            parts.append(f"{name}*")
            rules.append(f"{name}: {literal(self.tags.key_start)} {KEY} {literal(self._head_end)} {name}_value")
            rules += self._text(f"{name}_value", literal)
        return [f"{rule}: {' '.join(parts) or _EMPTY}", *rules]

    @property
    def _head_end(self) -> str:
        tags = self.tags
        opening = tags.line_end + tags.value_start if tags.value_start else ""
        return tags.key_end + opening + "\n" * tags.in_lines

    @property
    def _tail(self) -> str:
        return "\n" * self.tags.in_lines + self.tags.value_end + self.tags.line_end

    def _value(
        self, rule: str, schema: Any, root: Mapping[str, Any], strict: bool, literal: Callable[[str], str]
    ) -> list[str]:
        part = part_of(schema, root)
        values = allowed_values(part)
        if values is not None:
            texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
            if any(self.tags.value_end in text for text in texts):
                if strict:
                    refuse(f"a value with {self.tags.value_end} in it")
                return self._text(rule, literal)
            return [f"{rule}: ({' | '.join(literal(text) or _EMPTY for text in texts)}) {literal(self._tail)}"]
        types = types_of(part, root)
        if "string" in types:
            check_text(part, types, strict)
            return self._text(rule, literal)
        return [f"{rule}: {rule}_json {literal(self._tail)}", json_rule(f"{rule}_json", part, strict)]

    def _text(self, rule: str, literal: Callable[[str], str]) -> list[str]:
        """Any text, which ends where its end begins first."""
        tail = literal(self._tail)
        lazy = "" if "<[" in tail else "[lazy]"  # a control token is no text, and so ends it
        return [f"{rule}{lazy}: {ANY_TEXT} {tail}"]


def _style(name: str, tags: Tags, form: CallForm, *other_marks: str) -> ToolStyle:
    read = functools.partial(_read_tagged, tags)
    return ToolStyle(name, read, form, marks=(tags.mark, *other_marks), arguments=_TaggedRules(tags).rules)


def _function_form(tags: Tags) -> CallForm:
    return CallForm(f"{tags.mark}\n<function=", ">\n", f"</function>\n{tags.mark_end}", between="\n")


GLM = _style("glm", _GLM_TAGS, CallForm(HERMES_CALL, "\n", HERMES_CALL_END, between="\n"))
# GLM-4.7 and later write no line breaks.
GLM_DENSE = _style("glm", _DENSE_TAGS, CallForm(HERMES_CALL, "", HERMES_CALL_END))
# These models sometimes leave the mark around a call out.
QWEN3_CODER = _style("qwen3_coder", _QWEN_TAGS, _function_form(_QWEN_TAGS), "<function=")
SEED_OSS = _style("seed_oss", _SEED_TAGS, _function_form(_SEED_TAGS))
MINIMAX = _style(
    "minimax",
    _MINIMAX_TAGS,
    CallForm('<invoke name="', '">\n', "</invoke>\n", first=f"{MINIMAX_CALLS}\n", last=MINIMAX_CALLS_END),
)
