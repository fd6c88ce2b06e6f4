"""Schemas within Lark grammars, as tools' are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from realizar.errors import InvalidRequestError
from realizar.sampling_params import StructuredOutput
from realizar.structured.lark_schemas import prepare_lark_schemas
from structured.grammar_walks import TOKENS, masks_of, small_factory

FACTORY = small_factory()
BYTES = {token: index for index, token in enumerate(TOKENS) if len(token) == 1 and index > 1}


def accepts(lark: str, text: str) -> bool:
    matcher = FACTORY.compile(StructuredOutput("lark", lark)).start()
    matcher.advance([BYTES[bytes((byte,))] for byte in text.encode()])
    if matcher.error is not None:
        return False
    (mask,) = masks_of(FACTORY, [(matcher, ())])
    return bool(mask[0][0] & 1)  # the end


def string_of(pattern: str, **options: Any) -> str:
    schema = {"type": "string", "pattern": pattern, **({"x-guidance": options} if options else {})}
    return f'start: "<" arguments ">"\narguments: %json {json.dumps(schema)}'


@pytest.mark.parametrize("options", [{}, {"lenient": True}, {"whitespace_flexible": False}])
def test_patterns_are_those_of_schemas(options: dict[str, Any]) -> None:
    """Digits are ASCII's, and a negated set does not let a string end where it should not."""
    digits = string_of(r"^\d+$", **options)
    assert accepts(digits, '<"19">')
    assert not accepts(digits, '<"٣">')
    assert not accepts(string_of('^[^"]*$', **options), r'<"a\"b">')


def test_white_space_is_bounded_where_a_grammar_leaves_it_open() -> None:
    lark = 'start: %json {"type": "array", "items": {"type": "integer"}}'
    assert accepts(lark, "[1, 2]")
    assert accepts(lark, "[\n  1\n]")
    assert not accepts(lark, "[1,  2]")
    own = lark.replace('{"type": "array"', '{"x-guidance": {"whitespace_pattern": " {2}"}, "type": "array"')
    assert accepts(own, "[1,  2]")


def test_what_is_lenient_is_passed_over() -> None:
    refused = "[[:alpha:]]"
    with pytest.raises(InvalidRequestError, match="named set"):
        FACTORY.compile(StructuredOutput("lark", string_of(refused)))
    assert accepts(string_of(refused, lenient=True), '<"a">')


def test_what_contains_itself_is_refused() -> None:
    inner = {"a": {"anyOf": [{"$ref": "#"}]}}
    schema: dict[str, Any] = {"type": "object", "properties": inner, "required": ["a"]}
    with pytest.raises(InvalidRequestError, match="no finite value satisfies it"):
        FACTORY.compile(StructuredOutput("lark", f"start: %json {json.dumps(schema)}"))
    schema["required"] = []
    assert accepts(f"start: %json {json.dumps(schema)}", '{"a": {}}')
    lenient = {**schema, "required": ["a"], "x-guidance": {"lenient": True}}
    assert accepts(f"start: %json {json.dumps(lenient)}", '{"a": {}}')


TEXTS, NUMBERS, ANY = ['"ab"'], ["7"], ['"ab"', "7", "null"]
UNENFORCEABLE: list[tuple[Any, list[str]]] = [
    *(({"type": "string", "pattern": pattern}, TEXTS) for pattern in ("(?=a)b", r"\ba", r"(a)\1", r"a\Z", "(", 5)),
    ({"type": "string", "pattern": "(?!a)", "maxLength": 1}, []),
    ({"type": "strin"}, ANY),
    ({"type": None}, ANY),
    ({"required": None}, ANY),
    ({"$ref": "http://x.org/y"}, ANY),
    ({"$ref": "#/$defs/nope"}, ANY),
    ({"type": "string", "minLength": "x"}, TEXTS),
    ({"type": "string", "maxLength": -1}, TEXTS),
    ({"type": "string", "format": 5}, TEXTS),
    ({"type": "string", "format": "path"}, TEXTS),
    ({"type": "integer", "minimum": "3"}, NUMBERS),
    ({"type": "integer", "minimum": 2**53 + 1}, NUMBERS),
    ({"type": "integer", "minimum": 5, "maximum": 3}, NUMBERS),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, NUMBERS),
    ({"type": "integer", "multipleOf": 0}, NUMBERS),
    ({"properties": None}, ANY),
    ({"patternProperties": {"(?=a)": {}}}, ANY),
    ({"enum": []}, ANY),
    ({"enum": None}, ANY),
    ({"anyOf": None}, ANY),
    ({"items": 3}, ANY),
    ({"additionalProperties": None}, ANY),
    ({"const": 2**53 + 1}, ANY),
    ({"not": {"type": "string"}}, ANY),
    (None, ANY),
]


@pytest.mark.parametrize(("schema", "taken"), UNENFORCEABLE)
def test_what_cannot_be_enforced_is_left_out_and_the_rest_holds(schema: Any, taken: list[str]) -> None:
    whole = {
        "type": "object",
        "properties": {"q": schema, "n": {"type": "integer", "maximum": 9}},
        "required": ["q", "n"],
        "additionalProperties": False,
        "x-guidance": {"lenient": True},
    }
    lark = f"start: %json {json.dumps(whole)}"
    assert [value for value in ANY if accepts(lark, f'{{"q":{value},"n":9}}')] == taken
    assert [value for value in ANY if accepts(lark, f'{{"q":{value},"n":10}}')] == []


def test_what_nothing_satisfies_leaves_its_requirement_out() -> None:
    inner = {"a": False, "b": {"type": "null"}}
    whole = {"type": "object", "properties": inner, "required": ["a"], "x-guidance": {"lenient": True}}
    assert accepts(f"start: %json {json.dumps(whole)}", '{"b": null}')
    deep: dict[str, Any] = {"type": "string", "pattern": "(?=a)"}
    for _ in range(80):
        deep = {"type": "object", "properties": {"a": deep}}
    assert accepts(f"start: %json {json.dumps({**deep, 'x-guidance': {'lenient': True}})}", '{"a": {}}')


@pytest.mark.parametrize(
    "text",
    [
        'start: "%json {\\"type\\": 5}"',
        'start: "a" // %json {"type":   5}\n',
        'start: /%json {"a":   1}/',
        "start: %json [1,   2]",
        'start: %json {"type":   ',
        'start: "a" "\\"%json {\\"b\\":   1}"',
        "start: %json " + "[" * 5000,
    ],
)
def test_what_is_no_schema_stays(text: str) -> None:
    assert prepare_lark_schemas(text, " ", lambda grammar: True) == text


def test_several_schemas() -> None:
    text = 'start: a b\na: %json {"pattern": "\\\\d"}\nb: "x" %json{"items": {}}  "y"\n'
    found = prepare_lark_schemas(text, "WS", lambda grammar: True)
    options = '"x-guidance": {"whitespace_pattern": "WS"}'
    assert (
        found
        == f'start: a b\na: %json {{"pattern": "[0-9]", {options}}}\nb: "x" %json{{"items": {{}}, {options}}}  "y"\n'
    )
