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
        ({"type": "string", "format": "time", "pattern": "^2"}, ['"10:00:00Z"'], ['"20:00:00Z"']),
    ],
)  # fmt: skip
def test_narrowed(schema: dict[str, Any], refused: list[str], taken: list[str]) -> None:
    assert [text for text in refused if accepts(schema, text)] == []
    assert [text for text in taken if not accepts(schema, text)] == []
