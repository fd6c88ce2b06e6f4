"""Preparation of JSON schemas for the compiler: reading, bounds, and removal of keywords without effect. Standard
library only.

A schema is refused if it exceeds the bounds or nests endlessly. The compiler decides about its keywords.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from realizar.errors import InvalidRequestError
from realizar.structured.json_format import narrow_format
from realizar.structured.json_numbers import check_constants, narrow_bounds
from realizar.structured.json_pattern import safe_pattern
from realizar.structured.schema_ends import can_end
from realizar.structured.schema_refusal import REFUSED, refuse_schema

MAX_SCHEMA_CHARACTERS = 512 << 10
MAX_DEPTH = 64
MAX_PROPERTIES = 4096  # in all objects together
MAX_OBJECT_PROPERTIES = 1024  # compiling takes time quadratic in these: 0.2 s

# Keywords by the kind of their value. All others hold no schema, or refer to one (`$ref`).
ONE_SCHEMA = ("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else")
SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_COUNTS = frozenset(
    {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains"}
)
_SHOWN = 64  # characters of a name in a message
_DRAFTS = "json-schema.org/draft"  # of all versions that the compiler knows


def read_schema(text: str) -> dict[str, Any]:
    """Read and prepare the schema of a JSON text.

    Raises:
        InvalidRequestError: the text is not a JSON schema, is too large or too deep, or no value can satisfy it.
    """
    if len(text) > MAX_SCHEMA_CHARACTERS:
        refuse_schema(f"it has {len(text)} characters; at most {MAX_SCHEMA_CHARACTERS} are allowed")
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        refuse_schema(f"it is nested more than {MAX_DEPTH} deep")
    except ValueError as error:
        refuse_schema(f"it is not JSON: {error}")
    if schema is True:
        schema = {}
    if schema is False:
        refuse_schema("no value satisfies false")
    if not isinstance(schema, dict):
        refuse_schema("a schema is an object or a boolean")
    if "x-guidance" in schema:
        refuse_schema("x-guidance is not supported")
    prepare_schema(schema)
    return schema


def prepare_schema(schema: dict[str, Any]) -> None:
    """Prepare a schema for the compiler, in place.

    Raises:
        InvalidRequestError: the schema is too deep, has too many properties, or no value can satisfy it.
    """
    _check_depth(schema)
    _check_properties(schema)
    path: list[str] = []
    try:
        _prepare(schema, path)
    except InvalidRequestError as error:
        if not path:
            raise
        refuse_schema(f"{'.'.join(path)}: {str(error).removeprefix(REFUSED)}")
    check_end(schema)


def check_end(schema: dict[str, Any]) -> None:
    """Check that a schema has a finite value.

    Raises:
        InvalidRequestError: it has none.
    """
    if not can_end(schema):
        refuse_schema("no finite value satisfies it: what it requires contains itself ($ref)")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check_depth(schema: Any) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    refuse_schema(f"it is nested more than {MAX_DEPTH} deep")


def _check_properties(schema: Any) -> None:
    counts = list(_property_counts(schema))
    for count, most, where in (
        (max(counts, default=0), MAX_OBJECT_PROPERTIES, "an object"),
        (sum(counts), MAX_PROPERTIES, "it"),
    ):
        if count > most:
            refuse_schema(f"{where} has {count} properties; at most {most} are allowed")


def _property_counts(schema: Any) -> Iterator[int]:
    if isinstance(schema, dict):
        properties = schema.get("properties")
        if isinstance(properties, dict):
            yield len(properties)
        for _, each in _subschemas(schema):
            yield from _property_counts(each)


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas within one, each with its place, as messages show it."""
    for keyword in (*ONE_SCHEMA, *SCHEMA_LISTS):
        value = schema.get(keyword)
        if isinstance(value, list):
            yield from ((f"{keyword}[{place}]", each) for place, each in enumerate(value))
        elif value is not None and keyword in ONE_SCHEMA:
            yield keyword, value
    for keyword in SCHEMA_MAPS:
        value = schema.get(keyword)
        if isinstance(value, dict):
            yield from ((f"{keyword}.{name[:_SHOWN]}", each) for name, each in value.items())


def _prepare(schema: Any, path: list[str]) -> None:
    """Check numbers, rewrite patterns and formats, and remove what says nothing and would be refused.

    Args:
        path: places that lead to the schema; where one is refused, those that lead to that one.
    """
    if not isinstance(schema, dict):
        return
    check_constants(schema)
    for keyword in _COUNTS & schema.keys():
        if isinstance(schema[keyword], float) and schema[keyword].is_integer():
            schema[keyword] = int(schema[keyword])
    if _DRAFTS not in str(schema.get("$schema", _DRAFTS)):
        del schema["$schema"]  # the compiler would fetch it
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]
    if isinstance(schema.get("pattern"), str):
        schema["pattern"] = safe_pattern(schema["pattern"])
    by_pattern = schema.get("patternProperties")
    if isinstance(by_pattern, dict):
        schema["patternProperties"] = {safe_pattern(pattern): each for pattern, each in by_pattern.items()}
    for place, each in _subschemas(schema):
        path.append(place)
        _prepare(each, path)
        path.pop()
    narrow_format(schema)
    narrow_bounds(schema)
