"""Schemas that the compiler takes too wide: what it would let through, and what it must go on letting through."""

from __future__ import annotations

import json
from typing import Any

import pytest

from realizar.sampling_params import StructuredOutput
from structured.grammar_walks import END, next_ids, small_factory

FACTORY = small_factory()
FIRST_BYTE = 2  # of the ids of single bytes


def accepts(schema: dict[str, Any], text: str) -> bool:
    matcher = FACTORY.compile(StructuredOutput("json_schema", json.dumps(schema))).start()
    matcher.advance([FIRST_BYTE + byte for byte in text.encode()])
    return matcher.error is None and END in next_ids(FACTORY, matcher)


def matching(pattern: str) -> dict[str, Any]:
    return {"type": "string", "pattern": pattern}


@pytest.mark.parametrize(
    ("schema", "refused", "taken"),
    [
        (matching('^[^"]$'), [r'"\""'], [r'"\\"', r'"\n"', '"a"', '"é"']),
        (matching(r"^[^\\]$"), [r'"\\"'], [r'"\""', r'"\n"', '"a"']),
        (matching(r"^[^\"\\]$"), [r'"\\"', r'"\""'], [r'"\n"', '"a"']),
        (matching(r"^\P{P}$"), [r'"\\"', r'"\""', '"!"'], [r'"\n"', '"a"', '"é"']),
        (matching(r"^[^\p{P}]$"), [r'"\\"', r'"\""', '"!"'], [r'"\n"', '"a"']),
        (matching(r"^[a[^\"]]$"), [r'"\""'], ['"a"', r'"\\"']),
        (matching(r"^[^-a]$"), ['"-"', '"a"'], ['"b"', r'"\""']),
        (matching(r"^[^]a]$"), ['"]"', '"a"'], ['"b"', r'"\""']),
        (matching(r"^[\]\[^\"]$"), ['"a"'], ['"]"', '"["', '"^"', r'"\""']),
        (matching(r"^a--b&&c~~$"), ['"a"'], ['"a--b&&c~~"']),
        (matching(r"^.\S\W\D$"), ['"\\n\\n11"'], [r'"\"\"\"\""', '"ab-c"']),
        (
            {"type": "object", "patternProperties": {'^[^"]$': {"type": "null"}}, "additionalProperties": False},
            [r'{"\"": null}'],
            ['{"a": null}', "{}"],
        ),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0", "0.0", "0e5"], ["0.5", "0.1", "0.0001"]),
        ({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.1}, ["1", "1.0", "1.1"], ["1.05"]),
        ({"exclusiveMinimum": -1, "exclusiveMaximum": 0, "type": "number"}, ["0", "-0", "-1"], ["-0.5", "-0.25"]),
        ({"type": "integer", "exclusiveMinimum": 0, "maximum": 1}, ["0"], ["1"]),
        ({"type": "string", "format": "time"}, ['"10:00:60Z"'], ['"10:00:59Z"', '"10:00:59.5+01:00"']),
        ({"type": "string", "format": "date-time"}, ['"2024-01-01T10:00:60Z"'], ['"2024-02-29T10:00:00Z"']),
        (
            {"type": "string", "format": "email"},
            ['"a@"', '"@b.c"', '"a b@c.de"', f'"{"a" * 65}@b.de"'],
            ['"a.b+c@mail.example.com"', f'"{"a" * 31}.{"b" * 32}@b.de"'],
        ),
        # Bounds that doubles would move, and those that say nothing to a reader of 64 bits.
        ({"type": "integer", "exclusiveMinimum": 2**53 - 1, "maximum": 2**53 + 2}, [str(2**53 - 1)], [str(2**53)]),
        ({"type": "integer", "exclusiveMaximum": 1 - 2**53}, [str(1 - 2**53)], [str(-(2**53))]),
        ({"type": "integer", "minimum": 1.5, "exclusiveMaximum": 3.5}, ["1", "4"], ["2", "3"]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": 3, "maximum": 5.0}, ["3", "6"], ["4", "5"]),
        ({"type": ["integer", "null"], "exclusiveMinimum": 3}, ["3", "3.5"], ["4", "null"]),
        ({"type": "integer", "minimum": 10**18, "maximum": 10**18 + 128}, [str(10**18 - 1)], [str(10**18 + 1)]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["1.5"], ["0", "-5", "7"]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 5}, ["6"], ["5", "-7"]),
        ({"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1}, ["1.5"], ["1", "-7.5"]),
        ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, ['""', '"abc"'], ['"a"', '"ab"']),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 1.0}, ["[null, null]"], ["[]", "[null]"]),
        # A format that is not known is a note, and so is a draft of others.
        ({"type": "string", "format": "path", "maxLength": 2}, ['"abc"'], ['"a/"']),
        ({"type": "integer", "format": "int64"}, ["1.5"], ["1"]),
        ({"$schema": "https://example.com/draft", "type": "null"}, ["1"], ["null"]),
        ({"$ref": "#x", "$defs": {"A": {"$anchor": "x", "type": "boolean"}}}, ["1"], ["true"]),
        ({"items": {"$ref": "#x"}, "$defs": {"A": [], "B": {"$anchor": "x", "type": "array"}}}, ["[1]"], ["[[]]"]),
        ({"type": "string", "format": "time", "pattern": "^2"}, ['"10:00:00Z"'], ['"20:00:00Z"']),
    ],
)  # fmt: skip
def test_narrowed(schema: dict[str, Any], refused: list[str], taken: list[str]) -> None:
    assert [text for text in refused if accepts(schema, text)] == []
    assert [text for text in taken if not accepts(schema, text)] == []
