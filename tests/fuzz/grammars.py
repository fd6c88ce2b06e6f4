"""Random JSON schemas, regular expressions and Lark grammars: sound ones, and those on which libraries fail."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from fuzz import values

_KEYWORDS = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength"),
    *("minItems", "maxItems", "minProperties", "maxProperties", "pattern", "format", "const", "enum", "type"),
    *("properties", "required", "additionalProperties", "items", "prefixItems", "anyOf", "allOf", "oneOf", "$ref"),
    *("$defs", "not", "if", "default", "unknown", "contentEncoding", "patternProperties", "dependentRequired"),
)
_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object", "any", "")
_FORMATS = ("email", "date", "time", "date-time", "uuid", "ipv4", "ipv6", "uri", "hostname", "duration", "regex", "x")
REGEXES = (
    *(r"[a-z]+", r"\d{1,3}", r"(yes|no)", r"(a|b|c){2,5}", r"[^\"]*", r"\w+@\w+", r".", r"\p{Greek}+", r"(?i)abc"),
    *(
        "",
        "(",
        "[",
        "a{1000000}",
        "(a{1000}){1000}",
        "((a*)*)*b",
        "(?=a)b",
        r"\1",
        "(" * 3000 + ")" * 3000,
        "a" * 70_000,
    ),
    *(r"[\x00-\x1f]", "|".join(str(number) for number in range(3000)), "(a?){60}a{60}", r"\b", r"[[:alpha:]&&[^a]]"),
)
LARKS = (
    *('start: "yes" | "no"', "start: WORD\nWORD: /[a-z]+/", 'start: "a" start "b" | ""', "start: start", "start:"),
    *("", "start: x", 'start: ("a"|"b")~1000000', "%import common.NUMBER\nstart: NUMBER", "start: %json {}"),
    *("start: /(/", "start: " + "(" * 2000 + '"a"' + ")" * 2000, 'start: "' + "a" * 5000 + '"', "x: /a/\n" * 3000),
    *("start: a\na: b\nb: a", 'start: "\\ud800"', "start: <|im_end|>", "start: /[\\x00-\\uffff]{5000}/"),
)


# Each of these ended an engine once, or held it for seconds.
POISONS: tuple[Any, ...] = (
    {"const": -(2**63)},
    {"enum": [-(2**63), 2**63]},
    {"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 1},
    {"type": "integer", "minimum": 2**63 - 2, "maximum": 2**63},
    {"format": "email", "pattern": "a", "allOf": 5},
    {"minimum": 10**400, "maximum": 1.5},
    {"$defs": {str(place): {"$ref": f"#/$defs/{place + 1}"} for place in range(2000)}, "$ref": "#/$defs/0"},
    {"type": "string", "pattern": "(" * 500 + "a" + ")" * 500},
    values.nested(400, lists=False),
)


def schema(rng: Random, depth: int = 3) -> Any:
    """A JSON schema: a sound one in half of the cases."""
    if rng.random() < 0.1:
        return rng.choice(POISONS)
    return _sound(rng, depth) if rng.random() < 0.5 else _odd(rng, depth)


def regex(rng: Random) -> str:
    first = rng.choice(REGEXES)
    return first if rng.random() < 0.8 else first + rng.choice(REGEXES)


def lark(rng: Random) -> str:
    first = rng.choice(LARKS)
    return first if rng.random() < 0.8 else first + "\n" + rng.choice(LARKS)


def choices(rng: Random) -> list[str]:
    return [values.text(rng) for _ in range(rng.choice((0, 1, 2, 5, 300)))]


def _sound(rng: Random, depth: int) -> dict[str, Any]:
    kind = rng.choice(_TYPES[: 7 if depth else 5])
    made: dict[str, Any] = {"type": kind}
    if kind == "integer":
        low = rng.randrange(-1000, 1000)
        made |= {"minimum": low, "maximum": low + rng.randrange(100)}
    elif kind == "string":
        made |= rng.choice(({"maxLength": 8}, {"pattern": "^[a-c]{1,4}$"}, {"format": "date"}, {"enum": ["a", "b"]}))
    elif kind == "array":
        made |= {"items": _sound(rng, depth - 1), "maxItems": rng.randrange(1, 4)}
    elif kind == "object":
        names = rng.sample(values.WORDS, rng.randrange(1, 4))
        made |= {"properties": {name: _sound(rng, depth - 1) for name in names}, "required": names[:1]}
        made["additionalProperties"] = False
    return made


def _odd(rng: Random, depth: int) -> Any:
    if rng.random() < 0.1:
        return values.anything(rng, depth)
    made: dict[str, Any] = {}
    for keyword in rng.choices(_KEYWORDS, k=rng.randrange(1, 5)):
        made[keyword] = _keyword(rng, keyword, depth)
    if rng.random() < 0.1:
        made["$defs"] = {str(place): {"$ref": f"#/$defs/{place + 1}"} for place in range(rng.choice((2, 50, 1000)))}
        made["$ref"] = "#/$defs/0"
    return made


def _keyword(rng: Random, keyword: str, depth: int) -> Any:
    if rng.random() < 0.15 or not depth:
        return values.anything(rng, max(depth, 0))
    if keyword in ("properties", "$defs", "patternProperties"):
        return {values.text(rng)[:20]: schema(rng, depth - 1) for _ in range(rng.choice((0, 1, 3)))}
    if keyword in ("anyOf", "allOf", "oneOf", "prefixItems"):
        return [schema(rng, depth - 1) for _ in range(rng.choice((0, 1, 3)))]
    if keyword in ("items", "additionalProperties", "not", "if"):
        return rng.choice((True, False, schema(rng, depth - 1)))
    if keyword in ("enum", "required"):
        return [values.anything(rng, 1) for _ in range(rng.choice((0, 1, 3, 400)))]
    if keyword == "type":
        return rng.choice((rng.choice(_TYPES), list(_TYPES[:4]), []))
    if keyword == "format":
        return rng.choice(_FORMATS)
    if keyword == "pattern":
        return regex(rng)
    if keyword == "$ref":
        return rng.choice(("#", "#/$defs/a", "#/properties/a", "http://127.0.0.1/x.json", "", "#/%"))
    if keyword in ("const", "default"):
        return values.anything(rng, 1)
    return values.number(rng)


def structured(rng: Random) -> tuple[str, Any]:
    """A field of a request that asks for a grammar, and its value."""
    kind = rng.randrange(7)
    if kind == 0:
        return "guided_json", rng.choice((lambda made: made, json.dumps))(schema(rng))
    if kind == 1:
        return "guided_regex", regex(rng)
    if kind == 2:
        return "guided_choice", choices(rng)
    if kind == 3:
        return "guided_grammar", lark(rng)
    if kind == 4:
        return "response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": schema(rng)}}
    if kind == 5:
        return "response_format", {"type": rng.choice(("json_object", "text", "xml"))}
    ways = {"json": schema(rng), "regex": regex(rng), "choice": choices(rng), "grammar": lark(rng)}
    return "structured_outputs", {name: ways[name] for name in rng.sample(sorted(ways), rng.choice((1, 1, 2)))}
