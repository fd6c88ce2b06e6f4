"""Preparation of JSON schemas for the compiler: reading, bounds, and removal of keywords without effect. Standard
library only.

A schema is refused if it exceeds the bounds or nests endlessly. The compiler decides about its keywords.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NoReturn

from realizar.errors import InvalidRequestError
from realizar.structured.ascii_classes import ascii_classes, parts

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

    Raises InvalidRequestError where it is no JSON schema, is too large or too deep, or no value can satisfy it.
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

    Raises InvalidRequestError where it is too deep, has too many properties, or no value can satisfy it.
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
    counts = [len(found) for each in schemas_in(schema) if isinstance(found := each.get("properties"), dict)]
    if max(counts, default=0) > MAX_OBJECT_PROPERTIES:
        refuse_schema(f"an object has {max(counts)} properties; at most {MAX_OBJECT_PROPERTIES} are allowed")
    if sum(counts) > MAX_PROPERTIES:
        refuse_schema(f"it has {sum(counts)} properties; at most {MAX_PROPERTIES} are allowed")


def schemas_in(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema, and all within it."""
    if isinstance(schema, dict):
        yield schema
        for _, each in subschemas(schema):
            yield from schemas_in(each)


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def _values_in(value: Any) -> Iterator[Any]:
    """A JSON value, and all within it."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        yield value
        waiting += _children(value)


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
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

    `path` leads to the schema; where one is refused, to that one.
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
    for place, each in subschemas(schema):
        path.append(place)
        _prepare(each, path)
        path.pop()
    narrow_format(schema)
    narrow_bounds(schema)


# Narrowing of formats in JSON schemas that llguidance reads too widely.

# RFC 5321: 64 characters before the @, labels of 63.
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_EMAIL = rf"^{_ATOM}{{1,31}}(\.{_ATOM}{{1,32}})?@{_LABEL}(\.{_LABEL}){{1,3}}$"

# RFC 3339 allows second 60 only for leap seconds, so it is not written.
_STRICT = {"time": "^.{6}[0-5]", "date-time": "^.{17}[0-5]", "email": _EMAIL}
_ENFORCED = frozenset({"date-time", "time", "date", "duration", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"})


def narrow_format(schema: dict[str, Any]) -> None:
    """Add a strict pattern to a schema's `format`, or replace the format by one. An unknown format says nothing."""
    name = schema.get("format")
    if isinstance(name, str) and name not in _ENFORCED:
        del schema["format"]
    if isinstance(name, str) and name in _STRICT:
        _add_pattern(schema, _STRICT[name])


def _add_pattern(schema: dict[str, Any], pattern: str) -> None:
    if "pattern" in schema:
        others = schema.get("allOf", [])
        if not isinstance(others, list):
            refuse_schema("allOf must be a list")
        schema["allOf"] = [*others, {"pattern": pattern}]
    else:
        schema["pattern"] = pattern


# Numbers in JSON schemas that llguidance 1.9 would change or crash on: checks, and bounds in a form that it keeps to.
#
# llguidance converts a number to a double: 2^53 + 1 becomes 2^53, and near -2^63 it recurses endlessly.

_MOST = 2**63 - 1024  # beyond, doubles don't fit into 64 bits
_MOST_BOUND = 2**62  # near 2^63 no expression of a range is made
_MOST_EXACT = 2**53
_MOST_STATES = 100_000
_Rounded = Callable[[float], int]
# What makes the inclusive bound of integers of each.
_LOWS: dict[str, _Rounded] = {"minimum": math.ceil, "exclusiveMinimum": lambda bound: math.floor(bound) + 1}
_HIGHS: dict[str, _Rounded] = {"maximum": math.floor, "exclusiveMaximum": lambda bound: math.ceil(bound) - 1}
_BOUNDS = (*_LOWS, *_HIGHS)


def check_constants(schema: dict[str, Any]) -> None:
    """Raise InvalidRequestError for integers in `const` and `enum` that a double can't hold. Subschemas are left."""
    for keyword in ("const", "enum"):
        for value in _values_in(schema.get(keyword)):
            if isinstance(value, int) and not (-_MOST <= value <= _MOST and int(float(value)) == value):
                shown = str(value)[:40]
                refuse_schema(f"{keyword} has the integer {shown}, which no double holds exactly within 64 bits")


def narrow_bounds(schema: dict[str, Any]) -> None:
    """Write a schema's bounds of numbers so that llguidance keeps to them. Subschemas are not looked at.

    Bounds of integers become inclusive. Those that all 64-bit integers, or all doubles, are within say nothing. Raises
    InvalidRequestError where a bound can't be kept to.
    """
    for keyword in _BOUNDS:
        _number(schema, keyword)
    _check_step(schema)
    named = schema.get("type")
    types = set(named) if isinstance(named, list) and all(isinstance(each, str) for each in named) else {named}
    if "integer" in types and "number" not in types:
        _to_inclusive(schema)
    else:
        _off_whole_bounds(schema)
    if types & {"integer", "number", None}:
        _check_bounds(schema, exact_step="number" in types or "integer" in types)


def _to_inclusive(schema: dict[str, Any]) -> None:
    lows = [inclusive(schema.pop(each)) for each, inclusive in _LOWS.items() if _number(schema, each) is not None]
    highs = [inclusive(schema.pop(each)) for each, inclusive in _HIGHS.items() if _number(schema, each) is not None]
    if lows and max(lows) > -(2**63):
        schema["minimum"] = max(lows)
    if highs and min(highs) < 2**63 - 1:
        schema["maximum"] = min(highs)


def _off_whole_bounds(schema: dict[str, Any]) -> None:
    """Replace exclusive bounds that llguidance 1.9 reads as inclusive ones.

    llguidance does so if the bound is a whole number and the range is no wider than 1: it allows 0 above 0 and below
    0.5. The replacement excludes values within a millionth of the range from the bound.
    """
    low, high = _number(schema, "exclusiveMinimum"), _number(schema, "exclusiveMaximum")
    bottom = low if low is not None else _number(schema, "minimum")
    top = high if high is not None else _number(schema, "maximum")
    if bottom is None or top is None or not 0 < top - bottom <= 1:
        return
    margin = (top - bottom) * 1e-6
    if low is not None and low == int(low):
        del schema["exclusiveMinimum"]
        schema["minimum"] = _rounded(low + margin)
    if high is not None and high == int(high):
        del schema["exclusiveMaximum"]
        schema["maximum"] = _rounded(high - margin)


def _check_bounds(schema: dict[str, Any], *, exact_step: bool) -> None:
    """Refuse bounds that are changed or can't be compiled, and drop those that all doubles are within.

    Without `exact_step` the type is not said here: for an integer, one is added to an exclusive bound, as a double.
    """
    for keyword in _BOUNDS:
        bound = _number(schema, keyword)
        if bound is None:
            continue
        if abs(bound) == sys.float_info.max and (bound < 0) == (keyword in _LOWS):
            del schema[keyword]
        elif abs(bound) > _MOST_BOUND or (isinstance(bound, int) and int(float(bound)) != bound):
            refuse_schema(f"{keyword} {str(bound)[:40]} can't be enforced: it is beyond 2^62, or no double holds it")
        elif keyword.startswith("exclusive") and not exact_step and abs(bound) >= _MOST_EXACT:
            refuse_schema(f"{keyword} {str(bound)[:40]} can't be enforced without a type: it is 2^53 or beyond")


def _check_step(schema: dict[str, Any]) -> None:
    """Refuse a `multipleOf` whose expression has more states than a row can go through: one for each remainder."""
    step = _number(schema, "multipleOf")
    states = 0 if step is None else abs(Fraction(str(step)).numerator)
    for factor in (2, 5):
        while states and states % factor == 0:
            states //= factor
    if states > _MOST_STATES:
        refuse_schema(f"multipleOf {str(step)[:40]} can't be enforced: it has too many digits")


def _rounded(value: float) -> float:
    return float(f"{value:.15g}")


def _number(schema: dict[str, Any], keyword: str) -> float | None:
    """A bound, or None. JSON's numbers have no limits, but the arithmetic here and in llguidance has."""
    value = schema.get(keyword)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not -sys.float_info.max <= value <= sys.float_info.max:
        refuse_schema(f"{keyword} is beyond the range of a double")
    return value


# Rewriting of regular expressions in JSON schemas for llguidance.
#
# llguidance 1.9 reads a set that contains all control characters as if it contained every JSON escape: `[^"]` then
# allows `\"`. Such sets usually are negated sets, so negated sets are changed to exclude U+0001, which no text needs.
# Other ways to write such a set are refused.

_LEFT_OUT = r"\x01"
_CONTROL_RANGE = re.compile(
    r"(\\x[01]|\\x\{0*1?[0-9a-fA-F]\}|\\[uU]\{?0*[01][0-9a-fA-F]\b|\\[0-7atnvfrc]|\\?[\x00-\x1f]).{0,2}-"
)
_SET_OPERATIONS = ("&&", "--", "~~")
_LOOK_AROUNDS = ("(?=", "(?!", "(?<=", "(?<!")


def safe_pattern(pattern: str) -> str:
    r"""Rewrite an expression: negated sets exclude U+0001, and `\d`, `\w` and `\s` become sets of ASCII.

    Raises InvalidRequestError for a set that can't be made safe.
    """
    try:
        pattern = ascii_classes(pattern)
    except ValueError as error:
        refuse_schema(f"pattern {pattern[:100]!r}: {error}")
    written: list[str] = []
    for found, depth in parts(pattern):
        at, part = found.start(), found[0]
        if depth and pattern.startswith(_SET_OPERATIONS, at):
            _refuse(pattern, f"set operation {pattern[at : at + 2]}")
        if depth and _CONTROL_RANGE.match(pattern, at):
            _refuse(pattern, "range of control characters")
        if not depth and pattern.startswith(_LOOK_AROUNDS, at):
            _refuse(pattern, "look-around")
        if pattern.startswith("[:", at):
            _refuse(pattern, "named set [:")
        if found.lastgroup == "set" and part.endswith("]") and pattern.startswith("-", found.end()):
            _refuse(pattern, "range from ]")
        if found.lastgroup == "property" and ("^" in part or "!" in part):
            _refuse(pattern, f"negation in {part}")
        if found.lastgroup == "set" and part.startswith("[^"):
            part += _LEFT_OUT
        elif found.lastgroup == "property" and part.startswith(r"\P"):
            part = f"[{part}--{_LEFT_OUT}]"
        written.append(part)
    return "".join(written)


def _refuse(pattern: str, what: str) -> NoReturn:
    refuse_schema(f"pattern {pattern[:100]!r} has a {what}, which is not supported")


# The error of a refused JSON schema.

REFUSED = "the JSON schema can't be honoured: "


def refuse_schema(reason: str) -> NoReturn:
    """Raise the InvalidRequestError of a refused schema; `reason` is one line."""
    raise InvalidRequestError(f"{REFUSED}{reason}", "structured")


# `can_end` checks that a JSON schema has a finite value, as schemas may refer (`$ref`) to themselves. Standard library
# only.
#
# Each schema is a node of a graph with conditions: another node, or one of several, must end. The search starts from
# nodes without conditions and visits each node once, so the time is linear in the schema's size.


def can_end(root: Mapping[str, Any]) -> bool:
    """True if a schema has a finite value.

    Only mandatory parts are followed: references, required properties, the items of an array that can't be empty, all
    of `allOf`, and one branch of every `anyOf` and `oneOf`. The compiler checks references that lead out of the schema
    or to nothing.
    """
    named = (each for each in _values_in(root) if isinstance(each, dict) and isinstance(each.get("$anchor"), str))
    anchors = {each["$anchor"]: each for each in named}
    known, nodes = {id(root)}, [root]
    num_open: Counter[int] = Counter()  # by node: conditions not met yet
    waiting = defaultdict[int, list[tuple[int, int]]](list)  # by node: (node, condition) that wait for it
    for node in nodes:  # which grows
        for condition, ways in enumerate(_conditions(node, root, anchors)):
            if not all(isinstance(way, dict) for way in ways):
                continue  # schemas that are no objects end at once
            num_open[id(node)] += 1
            for way in ways:
                waiting[id(way)].append((id(node), condition))
                if id(way) not in known:
                    known.add(id(way))
                    nodes.append(way)
    done = [number for number in known if not num_open[number]]
    met: set[tuple[int, int]] = set()
    while done:
        for number, condition in waiting[done.pop()]:
            if (number, condition) not in met:
                met.add((number, condition))
                num_open[number] -= 1
                if not num_open[number]:
                    done.append(number)
    return not num_open[id(root)]


def _conditions(schema: Mapping[str, Any], root: Mapping[str, Any], anchors: Mapping[str, Any]) -> Iterator[list[Any]]:
    """Lists of schemas; of each list, one must end."""
    reference = schema.get("$ref")
    if isinstance(reference, str):
        yield [_resolve(reference, root, anchors)]
    for each in _listed(schema, "allOf"):
        yield [each]
    for keyword in ("anyOf", "oneOf"):
        ways = _listed(schema, keyword)
        if ways:
            yield ways
    if _must_be(schema, "object"):
        yield from ([each] for each in _required(schema))
    if _must_be(schema, "array"):
        yield from ([each] for each in _needed_items(schema))


def _resolve(reference: str, root: Mapping[str, Any], anchors: Mapping[str, Any]) -> Any:
    if not reference.startswith("#"):
        return None
    if reference[1:2] not in ("", "/"):
        return anchors.get(reference[1:])
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _required(schema: Mapping[str, Any]) -> Iterator[Any]:
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict) and isinstance(required, list):
        yield from (properties.get(name) for name in required if isinstance(name, str))


def _needed_items(schema: Mapping[str, Any]) -> Iterator[Any]:
    least = schema.get("minItems", 0)
    if isinstance(least, int) and least >= 1:
        items = _listed(schema, "prefixItems")[:least]
        yield from items
        if least > len(items):
            yield schema.get("items")


def _listed(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _must_be(schema: Mapping[str, Any], kind: str) -> bool:
    named = schema.get("type")
    return named == kind or named == [kind]


# `free_strings` finds values of a JSON schema that are strings of any characters, by the names that they have in their
# objects. Standard library only.

_NOTES = frozenset({"title", "description", "default", "examples", "$schema", "$comment"})
_NUMBERS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_READ = frozenset(
    {"type", "enum", "const", "format", "pattern", "minLength", "maxLength", "properties", "required", "items"}
    | {"additionalProperties", "minItems", "maxItems", "$ref", "$defs", "definitions", "anyOf"}
)
_DEFINED = re.compile(r"#/(\$defs|definitions)/[^/]+")
_VALUES_OF_NO_NAME = {"string", "integer", "number", "boolean", "null"}


@dataclass(frozen=True, slots=True)
class FreeString:
    """Strings of at most so many characters, or any number of them. `is_one`: they stand at one place of a text, after
    which the same may follow whatever was before.
    """

    most: int | None
    is_one: bool


def free_strings(root: Mapping[str, Any]) -> dict[bytes, FreeString]:
    """The free strings of a prepared schema, by their names: each value of such a name, anywhere, is one.

    None are found where a value may have names that the schema does not list.
    """
    schemas = list(schemas_in(root))
    if not all(map(_lists_its_names, schemas)):
        return {}
    values = defaultdict[str, list[Any]](list)
    for each in schemas:
        for name, value in each.get("properties", {}).items():
            values[name].append(value)
    plain = set[str]()  # names of objects that are in no list, alternative or definition
    objects: list[Any] = [root]
    for each in objects:  # which grows
        properties = each.get("properties", {})
        plain |= properties.keys()
        objects += [value for value in properties.values() if isinstance(value, dict) and "$ref" not in value]
    return {
        name.encode(): FreeString(several[0].get("maxLength"), name in plain and len(several) == 1)
        for name, several in values.items()
        if all(map(_is_free, several))
        and len({each.get("maxLength") for each in several}) == 1
        and name.isascii() and name.isprintable() and not set(name) & set('"\\')
    }  # fmt: skip


def _is_free(value: Any) -> bool:
    most = value.get("maxLength", 0) if isinstance(value, dict) else None
    return type(most) is int and value.get("type") == "string" and value.keys() <= _NOTES | {"type", "maxLength"}


def _lists_its_names(schema: Mapping[str, Any]) -> bool:
    """True if an object that a schema itself describes has names of its `properties` alone."""
    kind, reference, ways = schema.get("type"), schema.get("$ref"), schema.get("anyOf")
    kinds = set(kind) if isinstance(kind, list) else {kind}
    constants = [*_listed(schema, "enum"), schema.get("const")]
    if not schema.keys() <= _READ | _NOTES | _NUMBERS or any(isinstance(each, dict | list) for each in constants):
        return False
    if not all(isinstance(each, dict) or each is False for _, each in subschemas(schema)):
        return False
    if reference is not None or ways is not None:
        is_known = reference is None or bool(_DEFINED.fullmatch(str(reference)))
        return is_known and schema.keys() <= _NOTES | {"$ref", "anyOf", "$defs", "definitions"}
    if kinds == {"object"}:
        return schema.get("additionalProperties") is False and isinstance(schema.get("properties", {}), dict)
    if kinds == {"array"}:
        return isinstance(schema.get("items"), dict)
    return kinds <= _VALUES_OF_NO_NAME or (kind is None and ("enum" in schema or "const" in schema))
