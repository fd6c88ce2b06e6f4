"""`ArgumentRules`: how a style that does not write JSON tells a grammar its arguments. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn, Protocol

from realizar.errors import InvalidRequestError
from realizar.tokenizer.parsers.argument_types import resolve

ANY_TEXT = r"/(.|\n)*/"
SPACING: Mapping[str, Any] = MappingProxyType(
    {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
)
ANYTHING: Mapping[str, Any] = MappingProxyType({})  # the schema of any value
_TEXT_KEYWORDS = ("pattern", "format", "minLength", "maxLength", "not", "if")
_OBJECT_KEYWORDS = ("anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "minProperties", "maxProperties")


class ArgumentRules(Protocol):
    """Writes the rules of a call's arguments, in llguidance's Lark."""

    def rules(self, rule: str, parameters: Mapping[str, Any], strict: bool, literal: Callable[[str], str]) -> list[str]:
        """The rules for arguments by a schema.

        Args:
            rule: name of the rule to write; the names of further ones begin with it.
            parameters: the tool's JSON schema, of an object.
            strict: a keyword that can't be enforced is an error; otherwise it is ignored.
            literal: writes a text as strings and control tokens.

        Raises:
            InvalidRequestError: the schema can't be enforced.
        """


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
    for keyword in _OBJECT_KEYWORDS:
        if strict and keyword in parameters:
            refuse(f"'{keyword}'")
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
    for keyword in _TEXT_KEYWORDS if strict else ():
        if keyword in schema:
            refuse(f"'{keyword}'")
    if strict and not types <= {"string", "null", "boolean"}:
        refuse("a text beside numbers, lists or objects")


def refuse(what: str) -> NoReturn:
    raise InvalidRequestError(
        f"a strict tool's parameters can't have {what}: this model does not write its calls as JSON", "tools"
    )
