"""Checks that records can't make: of objects within a request, such as messages and tools, and of values of fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias, TypeVar

import msgspec

from realizar.server.errors import refused, unsupported
from realizar.server.http.unknown_fields import known_only

T = TypeVar("T", str, bool, list[Any], dict[str, Any])
Neutral: TypeAlias = Mapping[str, tuple[tuple[Any, ...], str]]
"""Known fields that have no effect here: the values that are accepted beside null, and why others are not."""
_WORDS = {str: "text", bool: "true or false", list: "a list", dict: "an object"}


def checked(path: str, value: object, kind: type[T], code: str | None = None) -> T:
    """The value at a path, which must be of a kind. Raises ApiError: 400; `param` is the path."""
    if not isinstance(value, kind):
        raise refused(f"{path} must be {_WORDS[kind]}", path, code)
    return value


def optional(path: str, value: object, kind: type[T], code: str | None = None) -> T | None:
    """The same of a value that may be null."""
    return None if value is None else checked(path, value, kind, code)


def text_in(where: str, given: Mapping[str, Any], name: str, *, may_be_empty: bool = False) -> str:
    """The text of a field that must be there."""
    value = given.get(name)
    return checked(f"{where}.{name}", value if value or may_be_empty else None, str)


def check_fields(
    where: str,
    given: dict[str, Any],
    known: Collection[str],
    kinds: Mapping[str, type[Any]],
    code: str | None = None,
) -> None:
    """Refuse unknown fields of an object, and those of `kinds` that are neither null nor of their kind."""
    known_only(where, given, known)
    for name, value in given.items():
        if name in kinds:
            optional(f"{where}.{name}", value, kinds[name], code)


def table_record(name: str, kinds: Mapping[str, Any], base: type[msgspec.Struct] = msgspec.Struct) -> Any:
    """A base of records, with the fields of a table, which may be absent, after those of its own base.

    Type checkers see none of them.
    """
    fields = [(field, kind, None) for field, kind in kinds.items()]
    return msgspec.defstruct(name, fields, bases=(base,), kw_only=True, forbid_unknown_fields=True)


def check_neutral(record: msgspec.Struct, rules: Neutral) -> None:
    """Raise ApiError (400) where a field that has no effect here has a value that is not neutral."""
    options = getattr(record, "stream_options", None)
    if options is not None and options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation", "is not supported: the stream has no padding")
    for name, (accepted, reason) in rules.items():
        value = getattr(record, name, None)
        if value is not None and not any(type(value) is type(each) and value == each for each in accepted):
            raise unsupported(name, reason)
