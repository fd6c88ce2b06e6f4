"""JSON types that a schema allows, and values whose text does not show their type. Standard library only."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from realizar.tokenizer.parsers.cursor import Cursor, Give, Reading, pass_until

ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
STRING = frozenset({"string"})
_MAX_REFERENCES = 16
_MAX_SCHEMAS = 500
_MAX_PYTHON = 64 << 10  # characters; reading them takes some hundred times as much memory
_TYPES = {type(None): "null", bool: "boolean", str: "string", int: "integer", float: "number", list: "array"}
# Models write these words of Python too.
_WORDS = {"True": "true", "False": "false", "None": "null"}


def resolve(schema: Any, root: Mapping[str, Any]) -> Any:
    """Follow a schema's `$ref` into the root schema; the schema itself where it leads elsewhere or in a circle."""
    found = schema
    for _ in range(_MAX_REFERENCES):
        reference = found.get("$ref") if isinstance(found, Mapping) else None
        if not isinstance(reference, str):
            return found
        if not reference.startswith("#"):
            break
        found = root
        for part in reference.removeprefix("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, Mapping) else None
    return schema


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a part of a schema allows; all where it names none. References lead into `root`."""
    return _types(schema, root, set())


def _types(schema: Any, root: Mapping[str, Any], seen: set[int]) -> frozenset[str]:
    """The types of a schema; none for one that was seen before, so that each is read once."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping):
        return ALL_TYPES
    if id(schema) in seen or len(seen) > _MAX_SCHEMAS:
        return frozenset()
    seen.add(id(schema))
    types = ALL_TYPES
    for allowed in _constraints(schema, root, seen):
        types = (types & allowed) or types
    if schema.get("nullable") is True:
        types |= {"null"}
    return types


def _constraints(schema: Mapping[str, Any], root: Mapping[str, Any], seen: set[int]) -> Iterator[frozenset[str]]:
    named = schema.get("type")
    if named is not None:
        names = {each.lower() for each in (named if isinstance(named, list) else [named]) if isinstance(each, str)}
        yield frozenset(names | ({"integer"} if "number" in names else set())) & ALL_TYPES
    if isinstance(schema.get("enum"), list):
        yield frozenset(_type_of(each) for each in schema["enum"])
    if "const" in schema:
        yield frozenset({_type_of(schema["const"])})
    for keyword in ("anyOf", "oneOf"):
        branches = schema.get(keyword)
        if isinstance(branches, list) and branches:
            yield frozenset().union(*(_types(each, root, seen) for each in branches))
    for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        yield _types(each, root, seen)


def _type_of(value: Any) -> str:
    return _TYPES.get(type(value), "object")


def string_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def value_text(text: str, types: frozenset[str]) -> str:
    """The JSON of a value whose text is written without its type: strings without quotes, all else as JSON.

    A text that is no JSON of an allowed type is a string, so that nothing is lost.
    """
    stripped = text.strip()
    stripped = _WORDS.get(stripped, stripped)
    try:
        value = json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = text
        if not types & {"string"} and (found := _from_python(stripped)) is not None:
            stripped, value = found
    name = _type_of(value)
    if name != "string" and (name in types or (name == "number" and types & {"integer"} and value.is_integer())):
        return stripped
    return f'"{string_text(text)}"'


def _from_python(text: str) -> tuple[str, Any] | None:
    """The JSON and the value of a list or a mapping that is written as in Python; None for another text."""
    if not text.startswith(("[", "{")) or len(text) > _MAX_PYTHON:
        return None
    try:
        value = ast.literal_eval(text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False), value
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def pass_bare_value(cursor: Cursor, ends: Sequence[str], give: Give) -> Reading[None]:
    """Pass a value without quotes on as JSON, up to one of `ends`; a text that the answer's end cuts stays open."""
    texts: list[str] = []
    ended = not (yield from pass_until(cursor, ends, texts.append))
    text = value_text("".join(texts).strip(), ALL_TYPES)
    give(text.removesuffix('"') if ended else text)


def _refuse(name: str) -> NoReturn:
    raise ValueError(name)
