"""How a style that does not write JSON tells a grammar its arguments. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from realizar.errors import InvalidRequestError
from realizar.tokenizer.parsers.argument_types import resolve

KEY = r"/[A-Za-z_][A-Za-z0-9_]{0,63}/"
ANY_TEXT = r"/(.|\n)*/"
SPACING: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ANYTHING: Mapping[str, Any] = {}  # the schema of any value
_TEXT_KEYWORDS = ("pattern", "format", "minLength", "maxLength", "not", "if")
_OBJECT_KEYWORDS = ("anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "minProperties", "maxProperties")


ArgumentRules = Callable[[str, Mapping[str, Any], bool, Callable[[str], str]], list[str]]
"""Writes the rules of a call's arguments, in llguidance's Lark. It takes:

1. the name of the rule to write, with which the names of further ones begin;
2. the tool's JSON schema, of an object;
3. whether it is strict: a keyword that can't be enforced is an InvalidRequestError then, and ignored otherwise;
4. what writes a text as strings and control tokens.
"""


def member_rules(rule: str, place: int, count: int, member: str, comma: str, *, required: bool) -> list[str]:
    """The rules of one of `count` members in their order: `{rule}_head_0` is all of them.

    `head` writes the first member that is there, `tail` each later one behind a comma.
    """
    name, last = f"{rule}_member_{place}", place + 1 == count
    tail = "" if last else f" {rule}_tail_{place + 1}"
    other = "" if required else ' | ""' if last else f" | {rule}_head_{place + 1}"
    rules = [f"{name}: {member}", f"{rule}_head_{place}: {name}{tail}{other}"]
    behind = f'"{comma}" {name}' if required else f'("{comma}" {name})?'
    return [*rules, f"{rule}_tail_{place}: {behind}{tail}"] if place else rules


def json_rule(rule: str, schema: Mapping[str, Any], strict: bool, spacing: Mapping[str, Any] = SPACING) -> str:
    """The rule of a JSON value, by default with the white space of Python's `json.dumps`, as templates write calls."""
    options = spacing if strict else {**spacing, "lenient": True}
    return f"{rule}: %json {json.dumps({**schema, 'x-guidance': {**options}})}"


def part_of(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a schema as a schema of its own, which keeps the definitions that it may refer to."""
    found = resolve(schema, root)
    definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
    return {**definitions, **found} if isinstance(found, Mapping) else definitions


def members(parameters: Mapping[str, Any], strict: bool) -> list[tuple[str, Any, bool]]:
    """The members of an object by its schema: name, schema, and True if it is required.

    Raises InvalidRequestError where it is `strict`, and the schema says more of its members than that.
    """
    check_keywords(parameters, _OBJECT_KEYWORDS, strict)
    given = parameters.get("properties")
    properties: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
    listed = parameters.get("required")
    required = [each for each in listed if isinstance(each, str)] if isinstance(listed, list) else []
    properties.update({name: ANYTHING for name in required if name not in properties})
    return [(name, schema, name in required) for name, schema in properties.items()]


def allowed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists; None if it lists none."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and values else None


def check_text(schema: Mapping[str, Any], types: frozenset[str], strict: bool) -> None:
    """Raise InvalidRequestError where a `strict` schema may refuse a value that may be any text."""
    check_keywords(schema, _TEXT_KEYWORDS, strict)
    if strict and not types <= {"string", "null", "boolean"}:
        refuse("a text beside numbers, lists or objects")


def check_keywords(schema: Mapping[str, Any], keywords: Sequence[str], strict: bool) -> None:
    """Raise InvalidRequestError where a `strict` schema has one of these keywords."""
    for keyword in keywords:
        if strict and keyword in schema:
            refuse(f"'{keyword}'")


def refuse(what: str) -> NoReturn:
    raise InvalidRequestError(
        f"a strict tool's parameters can't have {what}: this model does not write its calls as JSON", "tools"
    )
