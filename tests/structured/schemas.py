"""JSON schemas to generate by: a handmade list of what people send, and random ones of every supported keyword."""

from __future__ import annotations

from typing import Any

import numpy as np

Schema = dict[str, Any]


def _object(properties: Schema, required: list[str] | None = None, **more: Any) -> Schema:
    found = {"type": "object", "properties": properties, "additionalProperties": False, **more}
    return {**found, "required": list(properties) if required is None else required}


_TEXT: Schema = {"type": "string", "maxLength": 12}
_TREE: Schema = {
    "$defs": {
        "node": _object(
            {"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}}, ["value"]
        )
    },
    "$ref": "#/$defs/node",
}
HANDMADE: dict[str, Schema] = {
    "anything": {},
    "any object": {"type": "object"},
    "any array": {"type": "array"},
    "string": {"type": "string"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "several types": {"type": ["integer", "null", "boolean"]},
    "enum": {"enum": ["red", "green", 3, None, {"a": [1]}]},
    "enum of odd strings": {"enum": ['"', "\\", "\n", "é", "日本", ""]},
    "const": {"const": {"a": [1, 2.5, None], "b": "x"}},
    "bounded string": {"type": "string", "minLength": 3, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "pattern anywhere": {"type": "string", "pattern": "a[bc]", "maxLength": 100},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date and time": {"type": "string", "format": "date-time"},
    "email": {"type": "string", "format": "email"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "hostname": {"type": "string", "format": "hostname"},
    "duration": {"type": "string", "format": "duration"},
    "uri": {"type": "string", "format": "uri"},
    "format and pattern": {"type": "string", "format": "date-time", "pattern": "^2"},
    "nothing of punctuation": {"type": "string", "pattern": r"^\P{P}{2,5}$"},
    "no quotes and no hyphens": {"type": "string", "pattern": r"^[^-\"a-f]+$", "maxLength": 9},
    "bounded integer": {"type": "integer", "minimum": -17, "maximum": 256},
    "open bounds": {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    "bounded number": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2.25},
    "above nothing": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
    "between whole numbers": {"type": "number", "exclusiveMinimum": -1, "exclusiveMaximum": 0},
    "multiple": {"type": "integer", "multipleOf": 7},
    "decimal multiple": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 100},
    "person": _object({"name": _TEXT, "age": {"type": "integer", "minimum": 0, "maximum": 150}}),
    "optional properties": _object({"a": _TEXT, "b": {"type": "integer"}, "c": {"type": "null"}}, ["b"]),
    "all optional": _object({"a": {"type": "integer"}, "b": {"type": "integer"}}, []),
    "odd names": _object({'quo"te': {"type": "null"}, "spa ce": {"type": "null"}, "日": {"type": "null"}, "": _TEXT}),
    "nested": _object({"outer": _object({"inner": _object({"leaf": {"type": "boolean"}})})}),
    "list of objects": {"type": "array", "items": _object({"x": {"type": "number"}}), "minItems": 1, "maxItems": 3},
    "tuple": {"type": "array", "prefixItems": [_TEXT, {"type": "integer"}], "items": False, "minItems": 2},
    "tuple with rest": {"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "boolean"}},
    "empty array": {"type": "array", "maxItems": 0},
    "many items": {"type": "array", "items": {"enum": [0, 1]}, "minItems": 20, "maxItems": 25},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}},
    "map of a pattern": {
        "type": "object", "patternProperties": {"^x[0-9]$": {"type": "integer"}}, "additionalProperties": False,
    },
    "small map": {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 1},
    "at least one": {
        "type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "minProperties": 1,
        "additionalProperties": False,
    },
    "any of": {"anyOf": [{"type": "integer"}, _object({"error": _TEXT})]},
    "optional value": _object({"middle_name": {"anyOf": [_TEXT, {"type": "null"}]}}),
    "one of, distinguished by a constant": {
        "oneOf": [
            _object({"kind": {"const": "circle"}, "radius": {"type": "integer", "minimum": 1, "maximum": 50}}),
            _object({"kind": {"const": "square"}, "side": {"enum": [1, 2.5]}}),
        ]
    },
    "all of": {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 9}]},
    "all of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]},
        ]
    },
    "tree": _TREE,
    "linked list": {
        "$defs": {"list": {"anyOf": [{"type": "null"}, _object({"head": _TEXT, "tail": {"$ref": "#/$defs/list"}})]}},
        **_object({"list": {"$ref": "#/$defs/list"}}),
    },
    "reference to the root": _object({"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
    "described": {
        "title": "T", "description": "d", "examples": [1], "default": 3, "type": "integer", "deprecated": True,
        "$comment": "c", "readOnly": True,
    },
    "unique items said not to be": {"type": "array", "items": {"type": "null"}, "uniqueItems": False},
    "tool call": _object(
        {
            "name": {"const": "get_weather"},
            "arguments": _object({"city": _TEXT, "unit": {"enum": ["celsius", "fahrenheit"]}}, ["city"]),
        }
    ),
}  # fmt: skip

_NAMES = ("a", "b", "name", "value", "item", "long name", "é", "x-1", "0", "Key")


def random_schema(rng: np.random.Generator) -> Schema:
    """A schema of mixed keywords, with definitions now and then."""
    if rng.random() < 0.15:
        return {
            "$defs": {"part": _any_kind(rng, 2)},
            **_object({"first": {"$ref": "#/$defs/part"}, "second": _any_kind(rng, 2)}),
        }
    return _any_kind(rng, 3)


def _any_kind(rng: np.random.Generator, depth: int) -> Schema:
    leaves = (_string, _integer, _number, _constant, _plain)
    inner = (_array, _tuple, _record, _record, _map, _any_of, _all_of)
    kinds = leaves if depth == 0 else (*inner, *leaves[:3])
    return kinds[int(rng.integers(len(kinds)))](rng, depth - 1)


def _string(rng: np.random.Generator, depth: int) -> Schema:
    choice = rng.integers(4)
    if choice == 0:
        pattern = ("^[a-f0-9]{4,8}$", "^(foo|ba+r)?$", r"^\d{1,3}(\.\d{1,2})?$", '^[^"]{0,4}$', r"^[^\\a]\S\W?$")
        return {"type": "string", "pattern": str(rng.choice(pattern))}
    if choice == 1:
        return {"type": "string", "format": str(rng.choice(["date", "ipv4", "uuid", "time", "date-time", "email"]))}
    least = int(rng.integers(0, 6))
    return {"type": "string", "minLength": least, "maxLength": least + int(rng.integers(0, 6))}


def _integer(rng: np.random.Generator, depth: int) -> Schema:
    low = int(rng.integers(-1000, 1000))
    high = low + int(rng.integers(1, 1000))
    bounds: Schema = {"minimum": low} if rng.random() < 0.5 else {"exclusiveMinimum": low - 1}
    bounds |= {"maximum": high} if rng.random() < 0.5 else {"exclusiveMaximum": high + 1}
    if rng.random() < 0.3:
        return {"type": "integer", "multipleOf": int(rng.integers(2, 12))}
    return {"type": "integer", **bounds}


def _number(rng: np.random.Generator, depth: int) -> Schema:
    low = round(float(rng.uniform(-5, 5)), 2)
    key = "minimum" if rng.random() < 0.5 else "exclusiveMinimum"
    return {"type": "number", key: low, "maximum": round(low + float(rng.uniform(0.1, 50)), 2)}


def _constant(rng: np.random.Generator, depth: int) -> Schema:
    values = [1, -2.5, "red", "gr een", None, True, [1, "a"], {"k": []}, "日本"]
    chosen = [values[index] for index in rng.permutation(len(values))[: int(rng.integers(1, 5))]]
    return {"const": chosen[0]} if rng.random() < 0.3 else {"enum": chosen}


def _plain(rng: np.random.Generator, depth: int) -> Schema:
    return {"type": str(rng.choice(["boolean", "null", "integer", "number"]))}


def _array(rng: np.random.Generator, depth: int) -> Schema:
    least = int(rng.integers(0, 3))
    return {
        "type": "array",
        "items": _any_kind(rng, depth),
        "minItems": least,
        "maxItems": least + int(rng.integers(0, 4)),
    }


def _tuple(rng: np.random.Generator, depth: int) -> Schema:
    parts = [_any_kind(rng, 0) for _ in range(int(rng.integers(1, 4)))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _record(rng: np.random.Generator, depth: int) -> Schema:
    names = [_NAMES[index] for index in rng.permutation(len(_NAMES))[: int(rng.integers(1, 5))]]
    required = [name for name in names if rng.random() < 0.6]
    schema = _object({name: _any_kind(rng, depth) for name in names}, required)
    if rng.random() < 0.2:
        schema["additionalProperties"] = {"type": "integer"}
    return schema


def _map(rng: np.random.Generator, depth: int) -> Schema:
    return {"type": "object", "additionalProperties": _any_kind(rng, 0), "maxProperties": int(rng.integers(0, 4))}


def _any_of(rng: np.random.Generator, depth: int) -> Schema:
    return {"anyOf": [_any_kind(rng, depth) for _ in range(int(rng.integers(1, 4)))]}


def _all_of(rng: np.random.Generator, depth: int) -> Schema:
    return {
        "allOf": [
            {"type": "object", "properties": {"a": _any_kind(rng, 0)}, "required": ["a"]},
            {"type": "object", "properties": {"b": _any_kind(rng, 0)}, "required": ["b"]},
        ]
    }
