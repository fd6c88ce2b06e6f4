"""Styles of tool calls: each has a parsing function and the marks that start its calls. Standard library only."""

from __future__ import annotations

import functools
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, replace

from realizar.tokenizer.marks import (
    DEEPSEEK_CALL,
    DEEPSEEK_CALL_END,
    DEEPSEEK_CALLS,
    DEEPSEEK_CALLS_END,
    DEEPSEEK_NAME_END,
    GRANITE_CALLS,
    GRANITE_CALLS_END,
    HERMES_CALL,
    HERMES_CALL_END,
    LLAMA_CALL,
    MISTRAL_ARGUMENTS,
    MISTRAL_CALL_ID,
    MISTRAL_CALLS,
)
from realizar.tokenizer.parsers.calls import CallReader, Calls, read_arguments, read_calls
from realizar.tokenizer.parsers.cursor import NAME, NAME_LIMIT, Cursor, Reading
from realizar.tokenizer.parsers.grammar_rules import ArgumentRules

Reader = Callable[[Cursor, Calls, str], Reading[None]]

_FENCE = "```"
_FENCED_JSON = "```json"
_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class CallForm:
    """The texts around names and arguments, as the model's template writes earlier calls.

    Attributes:
        before_name, before_arguments, after: texts of one call.
        first, between, last: texts before, between and after all calls.
        alone: a single call omits `first` and `last`.
    """

    before_name: str
    before_arguments: str
    after: str
    first: str = ""
    between: str = ""
    last: str = ""
    alone: bool = False

    @property
    def begins_as_json(self) -> bool:
        """True if a call is a JSON object, and calls begin with nothing else or a list."""
        return self.before_name.startswith("{") and self.first in ("", "[")


def long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """A style of tool calls.

    Attributes:
        marks: texts that open a call anywhere in an answer.
        line_marks, first_marks: those that do at the beginning of a line, and of the answer.
        read: parses the text after a mark, given that mark; raises MismatchError if it is not a call.
        form: the texts of calls, for grammars that force them.
        arguments: writes the grammar's rules of a call's arguments; None if they are JSON.
        new_id: makes ids that the model's template accepts.
    """

    name: str
    read: Reader
    form: CallForm
    marks: tuple[str, ...] = ()
    line_marks: tuple[str, ...] = ()
    first_marks: tuple[str, ...] = ()
    arguments: ArgumentRules | None = None
    new_id: Callable[[], str] = long_id


def _short_id() -> str:
    """An id of nine letters and digits; templates of Mistral models refuse other ids."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


def _read_before(end: str, cursor: Cursor, calls: Calls, mark: str) -> Reading[None]:
    """Parse `{"name": ..., "arguments": ...}`, or a list of such objects, and the mark behind it."""
    yield from read_calls(cursor, calls, end)
    yield from cursor.space()
    yield from cursor.optional(end)
    cursor.save()


def _read_llama(cursor: Cursor, calls: Calls, mark: str) -> Reading[None]:
    """Parse `{"name": ..., "parameters": ...}`, with `;` between several, perhaps after `<|python_tag|>`."""
    marked = mark == LLAMA_CALL
    if not marked:
        cursor.position -= len(mark)  # the brace is part of the call
    yield from cursor.space()
    yield from _read_objects(cursor, calls, ";", marked=marked)


def _read_json(cursor: Cursor, calls: Calls, mark: str) -> Reading[None]:
    """Parse `{"name": ..., "arguments": ...}`, several in a list or one after the other, perhaps in a fence."""
    fenced = mark.startswith(_FENCE)
    if not fenced:
        cursor.position -= len(mark)
    yield from cursor.space()
    if (yield from cursor.peek()) == "[":
        yield from read_calls(cursor, calls, marked=False)
    else:
        yield from _read_objects(cursor, calls, ",;", marked=False)
    if fenced:
        yield from cursor.space()
        yield from cursor.optional(_FENCE)
        cursor.save()


def _read_objects(cursor: Cursor, calls: Calls, separators: str, *, marked: bool) -> Reading[None]:
    while True:
        yield from CallReader(cursor, calls, marked=marked).read()
        yield from cursor.space()
        yield from cursor.one_of(separators)
        yield from cursor.space()
        if (yield from cursor.peek()) != "{":
            cursor.position = cursor.saved
            return


def _read_mistral(cursor: Cursor, calls: Calls, mark: str) -> Reading[None]:
    """Parse `[TOOL_CALLS][{"name": ..., "arguments": ...}]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""
    yield from cursor.space()
    if (yield from cursor.peek()) in ("[", "{"):
        yield from read_calls(cursor, calls, MISTRAL_CALLS)
        return
    name = yield from cursor.match(NAME)
    calls.check_name(name)
    if (yield from cursor.optional(MISTRAL_CALL_ID)):
        yield from cursor.until(MISTRAL_ARGUMENTS, NAME_LIMIT)
    else:
        yield from cursor.optional(MISTRAL_ARGUMENTS)
    yield from cursor.space()
    yield from read_arguments(cursor, calls, name, (MISTRAL_CALLS,))


def _read_deepseek(cursor: Cursor, calls: Calls, mark: str) -> Reading[None]:
    """Parse a name and arguments between special marks; older models put the arguments into a fence."""
    if mark == DEEPSEEK_CALLS:
        yield from cursor.space()
        yield from cursor.expect(DEEPSEEK_CALL)
    name = yield from cursor.until(DEEPSEEK_NAME_END, NAME_LIMIT)
    if (yield from cursor.peek()) not in ("{", " ", "\n"):
        name = yield from cursor.until("\n", NAME_LIMIT)
        yield from cursor.space()
        yield from cursor.expect(_FENCED_JSON)
    yield from cursor.space()
    yield from read_arguments(cursor, calls, name.strip(), (DEEPSEEK_CALL_END,))
    for end in (_FENCE, DEEPSEEK_CALL_END, DEEPSEEK_CALLS_END):
        yield from cursor.space()
        yield from cursor.optional(end)
    cursor.save()


HERMES = ToolStyle(
    "hermes",
    functools.partial(_read_before, HERMES_CALL_END),
    CallForm(f'{HERMES_CALL}\n{{"name": "', '", "arguments": ', f"}}\n{HERMES_CALL_END}", between="\n"),
    marks=(HERMES_CALL,),
)
LLAMA = ToolStyle(
    "llama3",
    _read_llama,
    CallForm('{"name": "', '", "parameters": ', "}", between="; "),
    marks=(LLAMA_CALL,),
    first_marks=("{",),
)
MISTRAL_LIST = ToolStyle(
    "mistral",
    _read_mistral,
    CallForm('{"name": "', '", "arguments": ', "}", first=f"{MISTRAL_CALLS}[", between=", ", last="]"),
    marks=(MISTRAL_CALLS,),
    new_id=_short_id,
)
MISTRAL = replace(MISTRAL_LIST, form=CallForm(MISTRAL_CALLS, MISTRAL_ARGUMENTS, ""))
DEEPSEEK = ToolStyle(
    "deepseek",
    _read_deepseek,
    CallForm(DEEPSEEK_CALL, DEEPSEEK_NAME_END, DEEPSEEK_CALL_END, first=DEEPSEEK_CALLS, last=DEEPSEEK_CALLS_END),
    marks=(DEEPSEEK_CALLS, DEEPSEEK_CALL),
)
DEEPSEEK_FENCED = replace(
    DEEPSEEK,
    form=CallForm(
        f"{DEEPSEEK_CALL}function{DEEPSEEK_NAME_END}",
        f"\n{_FENCED_JSON}\n",
        f"\n{_FENCE}{DEEPSEEK_CALL_END}",
        first=DEEPSEEK_CALLS,
        between="\n",
        last=DEEPSEEK_CALLS_END,
    ),
)
GRANITE = ToolStyle(
    "granite",
    functools.partial(_read_before, GRANITE_CALLS_END),
    CallForm('{"name": "', '", "arguments": ', "}", first=f"{GRANITE_CALLS}[", between=", ", last="]"),
    marks=(GRANITE_CALLS,),
)
JSON = ToolStyle(
    "json",
    _read_json,
    CallForm('{"name": "', '", "arguments": ', "}", first="[", between=", ", last="]", alone=True),
    line_marks=(_FENCED_JSON, _FENCE, "{", "["),
)


def json_or(other: ToolStyle) -> ToolStyle:
    """The style `json`, extended to calls with another style's marks."""

    def read(cursor: Cursor, calls: Calls, mark: str) -> Reading[None]:
        yield from (other.read if mark in other.marks else JSON.read)(cursor, calls, mark)

    return replace(JSON, read=read, new_id=other.new_id, marks=other.marks) if other.marks else JSON
