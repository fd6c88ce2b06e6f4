"""Calls whose arguments stand between tags, without quotes; their types come from the tool's schema.

Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from realizar.tokenizer.parsers.argument_types import STRING, string_text, value_text
from realizar.tokenizer.parsers.calls import Calls
from realizar.tokenizer.parsers.cursor import Cursor, MismatchError, Reading, pass_until

NAME_LIMIT = 256
_NAME = re.compile(r"[\w.:/-]*")


@dataclass(frozen=True, slots=True)
class Tags:
    """The texts around a call's name, its arguments' names and their values.

    Attributes:
        name_start, name_end: texts around the call's name; empty if the name stands right behind the mark.
        key_start, key_end: texts around an argument's name.
        value_start, value_end: texts around its value.
        end: text after the last argument; empty if the mark's end follows.
        in_lines: True if a line break after `key_end` and one before `value_end` are not part of the value.
    """

    key_start: str
    key_end: str
    value_end: str
    value_start: str = ""
    name_start: str = ""
    name_end: str = ""
    end: str = ""
    in_lines: bool = False


def read_tagged(cursor: Cursor, calls: Calls, tags: Tags, mark: str, mark_end: str) -> Reading[None]:
    """Read the calls after a mark, up to and including its end.

    Arguments are emitted as JSON while they arrive: strings in parts, other values whole.

    Raises:
        MismatchError: the next text is not a call, or no tool has its name; earlier calls are emitted and saved.
    """
    if mark == tags.name_start:
        cursor.position -= len(mark)  # the call stands without the mark around it
    while True:
        yield from cursor.space()
        if tags.name_start:
            yield from cursor.expect(tags.name_start)
            name = (yield from cursor.until(tags.name_end, NAME_LIMIT)).strip()
        else:
            name = yield from cursor.match(_NAME)
        calls.check_name(name)
        yield from cursor.space()
        yield from _read_arguments(cursor, calls, tags, name, tags.end or mark_end)
        yield from cursor.space()
        if not tags.name_start or not (yield from _is_next(cursor, tags.name_start)):
            break
    yield from cursor.optional(mark_end)
    cursor.save()


def _is_next(cursor: Cursor, literal: str) -> Reading[bool]:
    found = yield from cursor.optional(literal)
    if found:
        cursor.position -= len(literal)
    return found


def _read_arguments(cursor: Cursor, calls: Calls, tags: Tags, name: str, end: str) -> Reading[None]:
    """Read a call's arguments and, where a call has one, its end. What follows malformed ones is not the call's."""
    if not (yield from _is_next(cursor, tags.key_start)):
        yield from cursor.expect(end)
        calls.open(name)
        calls.give("{}")
        cursor.position -= 0 if tags.end else len(end)
    else:
        calls.open(name)
        cursor.undecided = False  # what has been emitted is not read again
        separator = "{"
        while (yield from cursor.optional(tags.key_start)):
            if not (yield from _read_argument(cursor, calls, tags, name, separator, end)):
                break
            separator = ", "
            yield from cursor.space()
        else:
            calls.give("}")
        if tags.end:
            yield from cursor.optional(tags.end)
    cursor.undecided = True
    cursor.save()
    calls.close()


def _read_argument(cursor: Cursor, calls: Calls, tags: Tags, name: str, separator: str, end: str) -> Reading[bool]:
    """Read an argument behind its first tag; False if it is the last, as it is malformed or the text ends in it.

    Where the text ends in it, the arguments stay open: they are not whole, and a client must see that.
    """
    cursor.begin(cursor.position - len(tags.key_start))
    try:
        key = (yield from cursor.until(tags.key_end, NAME_LIMIT)).strip()
        if tags.value_start:
            yield from cursor.space()
            yield from cursor.expect(tags.value_start)
    except MismatchError:
        cursor.position = cursor.saved
        if not cursor.ended or end in cursor.text[cursor.position :]:
            calls.give("{}" if separator == "{" else "}")
        return False
    cursor.undecided = False
    if tags.in_lines:
        yield from cursor.optional("\n")
    types = calls.types(name, key)
    calls.give(f'{separator}"{string_text(key)}": ')
    return (yield from _pass_text(cursor, calls, tags) if types == STRING else _pass_whole(cursor, calls, tags, types))


def _pass_text(cursor: Cursor, calls: Calls, tags: Tags) -> Reading[bool]:
    """Pass a string on as it arrives."""
    held = ""  # a line break that may stand before the end

    def give(text: str) -> None:
        nonlocal held
        if not text:
            return
        text = held + text
        held = "\n" if tags.in_lines and text.endswith("\n") else ""
        calls.give(string_text(text[: len(text) - len(held)]))

    calls.give('"')
    if not (yield from pass_until(cursor, (tags.value_end,), give)):
        calls.give(string_text(held))
        return False
    cursor.position += len(tags.value_end)
    calls.give('"')
    return True


def _pass_whole(cursor: Cursor, calls: Calls, tags: Tags, types: frozenset[str]) -> Reading[bool]:
    """Pass a value on once it is whole; if the text ends before, what there is of it."""
    texts: list[str] = []
    ended = not (yield from pass_until(cursor, (tags.value_end,), texts.append))
    text = "".join(texts)
    if ended:
        calls.give(text)
        return False
    cursor.position += len(tags.value_end)
    calls.give(value_text(text.removesuffix("\n") if tags.in_lines else text, types))
    return True
