"""Parsing of tool calls: names, arguments, and the JSON object that most models write. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from realizar.tokenizer.parsers.argument_types import ALL_TYPES, types_of
from realizar.tokenizer.parsers.base import ToolCallDelta
from realizar.tokenizer.parsers.cursor import Cursor, Give, MismatchError, Reading, pass_until
from realizar.tokenizer.parsers.json_text import object_text, pass_value, read_string

Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]  # of each tool's parameters, by its name
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_OTHER_KEYS = frozenset({"type", "id"})


class AnswerEndedError(Exception):
    """The only allowed call is complete. The parser catches this; callers never see it."""


class Calls:
    """The calls of one answer, emitted as they are parsed.

    Args:
        tools: the parameters' JSON schema of each of the request's tools, by name; other texts are no calls.
        parallel: more than one call is allowed.
        show: makes a parsed text what the model wrote.
    """

    def __init__(
        self,
        tools: Schemas,
        new_id: Callable[[], str],
        emit: Callable[[ToolCallDelta], None],
        show: Callable[[str], str],
        *,
        parallel: bool = True,
    ) -> None:
        self._tools, self._new_id, self._emit, self._parallel = tools, new_id, emit, parallel
        self.show = show
        self._types: dict[tuple[str, str], frozenset[str]] = {}
        self.count = 0

    def has(self, name: str) -> bool:
        return name in self._tools

    def check_name(self, name: str) -> None:
        if name not in self._tools:
            raise MismatchError

    def expects(self, name: str, key: str) -> bool:
        """True if a known tool's schema names an argument, or names none at all."""
        properties = self._tools[name].get("properties")
        return not isinstance(properties, Mapping) or not properties or key in properties

    def types(self, name: str, key: str) -> frozenset[str]:
        """The JSON types that a known tool's schema allows for an argument."""
        schema, key = self._tools[name], self.show(key)
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or key not in properties:
            return ALL_TYPES
        if (name, key) not in self._types:
            self._types[name, key] = types_of(properties[key], schema)
        return self._types[name, key]

    def open(self, name: str) -> None:
        self._emit(ToolCallDelta(self.count, self._new_id(), name, ""))
        self.count += 1

    def give(self, arguments: str) -> None:
        if arguments:
            self._emit(ToolCallDelta(self.count - 1, None, None, arguments))

    def close(self) -> None:
        """End the open call; AnswerEndedError where no other call is allowed."""
        if not self._parallel:
            raise AnswerEndedError


def read_arguments(
    cursor: Cursor,
    calls: Calls,
    name: str,
    ends: tuple[str, ...],
    pass_object: Callable[[Cursor, Give], Reading[None]] = pass_value,
    opens: str = "{",
) -> Reading[None]:
    """Parse a call's arguments, an object, and emit them as they arrive.

    Arguments that turn out to be malformed are emitted as they are, up to one of `ends`, because their beginning has
    already been emitted. The client can check the whole. Raises MismatchError where the next text is not an object, or
    no tool has this name.

    `pass_object` reads the object, which begins with `opens`, and gives its JSON; raises MismatchError, the cursor
    after what was given.
    """
    calls.check_name(name)
    if (yield from cursor.peek()) != opens:
        raise MismatchError
    calls.open(name)
    cursor.undecided = False  # what has been emitted is not read again
    try:
        yield from pass_object(cursor, calls.give)
    except MismatchError:
        yield from pass_until(cursor, ends, calls.give)
    cursor.undecided = True
    cursor.save()
    calls.close()


def read_calls(cursor: Cursor, calls: Calls, end: str = "", *, marked: bool = True) -> Reading[None]:
    """Read one call or a list of calls, as of `CallReader`; MismatchError for something else: earlier calls are emitted
    and saved.
    """
    yield from cursor.space()
    is_list = yield from cursor.optional("[")
    while True:
        yield from cursor.space()
        yield from CallReader(cursor, calls, end, marked=marked).read()
        if not is_list:
            return
        yield from cursor.space()
        if not (yield from cursor.optional(",")):
            break
    yield from cursor.optional("]")
    cursor.save()


class CallReader:
    """Parses one call, `{"name": ..., "arguments": {...}}`; `parameters` is another name for arguments.

    `end` is the mark after a call, or empty. Unless a mark announced the call (`marked`), an object with other keys is
    none.
    """

    def __init__(self, cursor: Cursor, calls: Calls, end: str = "", *, marked: bool = True) -> None:
        self._cursor, self._calls, self._end, self._marked = cursor, calls, end, marked
        self._name: str | None = None
        self._arguments: str | None = None  # read before the name
        self._given = False

    def read(self) -> Reading[None]:
        """Read one call; MismatchError for something else. A call whose arguments were emitted stays a call."""
        cursor = self._cursor
        yield from cursor.expect("{")
        while True:
            yield from cursor.space()
            key = yield from read_string(cursor)
            yield from cursor.space()
            yield from cursor.expect(":")
            yield from cursor.space()
            yield from self._read_value(key)
            yield from cursor.space()
            if not (yield from cursor.optional(",")):
                break
        closed = yield from cursor.optional("}")
        if not self._given:
            if not closed:
                raise MismatchError
            self._give_whole("{}" if self._arguments is None else self._arguments)
        cursor.save()

    def _read_value(self, key: str) -> Reading[None]:
        cursor = self._cursor
        if key == "name" and self._name is None:
            name = yield from read_string(cursor)
            self._calls.check_name(name)
            self._name = name
            if self._arguments is not None:
                self._give_whole(self._arguments)
        elif key in _ARGUMENT_KEYS and not self._given and self._arguments is None:
            yield from self._read_arguments()
        elif self._marked or key in _OTHER_KEYS:
            yield from pass_value(cursor, lambda _text: None)
        else:
            raise MismatchError

    def _read_arguments(self) -> Reading[None]:
        cursor, texts = self._cursor, list[str]()
        char = yield from cursor.peek()
        if char == "{" and self._name is not None:
            self._given = True
            yield from read_arguments(cursor, self._calls, self._name, (self._end,) if self._end else ())
        elif char == "{":
            yield from pass_value(cursor, texts.append)
            self._arguments = "".join(texts)
        elif char == '"':
            self._arguments = object_text(self._calls.show((yield from read_string(cursor))))
            if self._arguments is None:
                raise MismatchError
        else:
            yield from cursor.expect("null")
            self._arguments = "{}"

    def _give_whole(self, arguments: str) -> None:
        if self._name is None:
            raise MismatchError
        self._given = True
        self._calls.open(self._name)
        self._calls.give(arguments)
        self._cursor.save()
        self._calls.close()
