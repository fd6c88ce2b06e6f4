"""Grammars that can't be honoured are refused at compilation, with the reason, and in bounded time."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from realizar.errors import InvalidRequestError
from realizar.sampling_params import StructuredOutput
from realizar.structured.grammar_tokens import GrammarTokens
from realizar.structured.json_schema import read_schema
from structured.grammar_walks import TOKENS, masks_of, small_factory

FACTORY = small_factory()


def refuse(kind: Any, value: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        FACTORY.compile(StructuredOutput(kind, value))
    assert caught.value.param == "structured"
    assert not re.search(r"\n|panic|backtrace|0x[0-9a-f]{4}|\.rs\b", str(caught.value))


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        # Keywords that the compiler does not know.
        ({"not": {"type": "string"}}, "not"),
        ({"if": {"type": "string"}, "then": {"minLength": 3}}, "if"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"type": "null"}}, "contains"),
        ({"type": "array", "minContains": 1}, "minContains"),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "dependentSchemas": {"a": {}}}, "dependentSchemas"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "array", "unevaluatedItems": False}, "unevaluatedItems"),
        ({"$dynamicRef": "#x"}, "dynamicRef"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "not"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "two of its schemas; use anyOf$"),
        ({"type": "object", "properties": {"a": {}}, "minProperties": 3}, "Properties"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "pattern": r"(a)\1"}, "backreferences"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
        ({"format": "email", "pattern": "a", "allOf": 5}, "allOf"),
        ({"format": "time", "pattern": "a", "allOf": {"a": 1}}, "allOf"),
        ({"minimum": 10**400, "maximum": 1.5}, "minimum is beyond"),
        ({"exclusiveMinimum": 0.5, "exclusiveMaximum": 10**400}, "exclusiveMaximum is beyond"),
        ({"minimum": -(10**400)}, "minimum is beyond"),
        ({"const": 2**53 + 1}, "const has the integer 9007199254740993"),
        ({"enum": ["a", {"b": [-(2**63)]}]}, "enum has the integer -9223372036854775808"),
        ({"properties": {"a": {"items": {"const": 2**63}}}}, "const has the integer"),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}, "minimum 9007199254740993 can't be enforced"),
        ({"type": "integer", "exclusiveMaximum": -(2**53)}, "maximum -9007199254740993 can't be enforced"),
        ({"type": "integer", "minimum": 2**63, "maximum": 2**63 + 5}, "minimum 9223372036854775808 can't be"),
        ({"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 5}, "maximum -92233720368547758"),
        ({"type": "number", "minimum": 2**53 + 1}, "minimum 9007199254740993 can't be enforced"),
        ({"type": "number", "minimum": 1e19, "maximum": 2e19}, r"minimum 1e\+19 can't be enforced"),
        ({"allOf": [{"type": "integer"}, {"exclusiveMinimum": 2**53}]}, "exclusiveMinimum 9007199254740992 can't be"),
        ({"type": "integer", "multipleOf": 2**53 + 1}, "multipleOf"),
        ({"type": "integer", "multipleOf": 2**32 - 1}, "multipleOf 4294967295 can't be enforced"),
        ({"$ref": "#x"}, "x"),
        # Schemas that nothing satisfies.
        ({"$ref": "#x", "$defs": {"a": {"$anchor": "x", "$ref": "#x"}}}, "contains itself"),
        ({"enum": []}, "empty"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
        ({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4}, "atisf|minimum|Minimum"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "types"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "'a'"),
        ({"type": "object", "properties": {}, "required": ["a"], "additionalProperties": False}, "'a'"),
        (False, "false"),
        ({"$ref": "#"}, r"\$ref"),
        ({"type": "object", "properties": {"c": {"$ref": "#"}}, "required": ["c"]}, r"\$ref"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, r"\$ref"),
        (
            {
                "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}},
                "$ref": "#/$defs/a",
            },
            r"\$ref",
        ),
        # No schemas.
        ([], "object or a boolean"),
        ("text", "object or a boolean"),
        ({"type": "strin"}, "strin"),
        ({"type": 3}, "type"),
        ({"properties": [1]}, "properties"),
        ({"minLength": -1, "type": "string"}, "minLength"),
        ({"$ref": "#/$defs/nope"}, "nope"),
        ({"$ref": "https://example.com/schema"}, "example.com"),
        # Too much.
        (deep(70), "64 deep"),
        ({"description": "x" * 600_000}, "characters"),
        ({"type": "object", "properties": {f"p{i}": {} for i in range(2000)}}, "2000 properties"),
        ({"$defs": {f"d{i}": {"properties": {f"p{j}": {} for j in range(900)}} for i in range(5)}}, "4500 properties"),
        ({"allOf": [{"anyOf": [{"properties": {f"k{i}": {"const": j}}} for j in (0, 1)]} for i in range(16)]}, "too"),
        ({"type": "number", "multipleOf": 1e-300}, "multipleOf"),
        # Sets of characters that the compiler would widen.
        ({"type": "string", "pattern": "[[:^alpha:]]"}, "named set"),
        ({"type": "string", "pattern": r"[\x00-!#-~]"}, "control characters"),
        ({"type": "string", "pattern": r"[\S&&[^a]]"}, "set operation"),
        ({"type": "string", "pattern": r"[^]-a]"}, "range from"),
        ({"type": "string", "pattern": r"[]\x00-~]"}, "control characters"),
        ({"type": "string", "pattern": r"[+-\d]"}, r"ends with \\d"),
        ({"type": "string", "pattern": "(?x) a # b"}, "flag x"),
        ({"type": "object", "patternProperties": {r"[\x00-!]": {}}}, "control characters"),
    ],
)
def test_schemas(schema: Any, words: str) -> None:
    refuse("json_schema", json.dumps(schema), words)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "not JSON"), ('{"const": NaN}', "not JSON"), ("[" * 100_000, "deep"), ('{"a": 1e999}', "can't be honoured")],
)
def test_texts_that_are_no_schemas(text: str, words: str) -> None:
    refuse("json_schema", text, words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[a-z", "unclosed"),
        ("(?=a)b", "look-ahead"),
        (r"a\bc", "lookarounds|word"),
        ("a{2,1}", "repetition"),
        ("a" * 70_000, "characters"),
        ("(" * 5000 + "a" + ")" * 5000, "regular expression"),
        ("[a&&b]", "can't be honoured"),
        (r"[a-\w]", r"ends with \\w"),
        ("(?x) a # b", "flag x"),
    ],
)
def test_regular_expressions(text: str, words: str) -> None:
    refuse("regex", text, words)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ('{"type": "string", "pattern": "(?=a)"}', "look-around"),
        ('{\n"type": "number",\n"multipleOf": 0}', "invalid multiple of"),
        ('{"type": "string", "minLength": 2, "maxLength": 1}', "minLength"),
    ],
)
def test_schemas_within_a_grammar_are_named_by_their_rules(schema: str, words: str) -> None:
    text = f'start: good | bad\ngood: %json {{\n"type":\n"object"}}\nbad: "x: " %json {schema}\nlast: "a"\n'
    refuse("lark", text, f"the JSON schema of the rule bad can't be honoured: .*{words}")


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"items": {"pattern": "[a&&b]"}}}}, "properties.a.items: pattern"),
        ({"$defs": {"x": {"anyOf": [{}, {"pattern": "a(?<!b)"}]}}}, r"\$defs.x.anyOf\[1\]: pattern .* look-around"),
        ({"items": [{}, {"const": 2**70}]}, r"items\[1\]: const"),
        ({"patternProperties": {"[a&&b]": {}}}, "pattern"),
        ({"properties": {"b" * 5000: {"allOf": 1, "format": "email", "pattern": "a"}}}, "properties.b{64}: allOf"),
    ],
)
def test_a_schema_is_refused_with_the_place_within_it(schema: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^the JSON schema can't be honoured: {path}"):
        read_schema(json.dumps(schema))


@pytest.mark.parametrize(
    ("lark", "nested", "words"),
    [
        ("start: @nested", ("json_schema", '{"type": "frob"}'), "the JSON schema can't be honoured: .*frob"),
        ("start: @nested", ("json_schema", '{"type": "string", "pattern": "(?=a)"}'), "the JSON schema .*look-around"),
        ("start: @nested", ("json_schema", "false"), "the JSON schema can't be honoured"),
        ("start: @nested", ("regex", "("), "the regular expression can't be honoured"),
        ("start: @nested", ("lark", "start: x"), "the Lark grammar can't be honoured: .*unknown name"),
        ("start: @nested", ("choice", "[]"), "choice must be"),
        ('start: @nested | bad\nbad: %json {"type": "frob"}', ("json_object", ""), "of the rule bad .*frob"),
        ("start: x", ("json_object", ""), "the Lark grammar can't be honoured: .*unknown name"),
        ("start: @nested", ("nested", '["start: @nested", "json_object", ""]'), "of another kind"),
        ("start: @nested", ("poem", "x"), "poem"),
        (3, ("json_object", ""), "a Lark grammar"),
    ],
)
def test_nested_grammars_name_the_part_at_fault(lark: Any, nested: tuple[str, str], words: str) -> None:
    refuse("nested", json.dumps([lark, *nested]), words)


@pytest.mark.parametrize("text", ["red", "[]", "{}", '["start: @nested"]', "[" * 100_000])
def test_texts_that_are_no_nested_grammars(text: str) -> None:
    refuse("nested", text, "nested must be a JSON list")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('begin: "a"', "start"),
        ("start: x", "unknown name"),
        ("start: /[/", "unclosed"),
        ("start: " + "(" * 2000 + '"a"' + ")" * 2000, "nested"),
        ("start: " + " | ".join(f'"w{i}"' for i in range(20_000)), "alternatives"),
        ('start: "' + "a" * 600_000 + '"', "characters"),
        ("start: <|nosuchtoken|>", "token"),
    ],
)
def test_lark(text: str, words: str) -> None:
    refuse("lark", text, words)


@pytest.mark.parametrize("text", ["red", "[]", '["a", ""]', '["a", 3]', '{"a": 1}', "[" * 100_000])
def test_choices(text: str) -> None:
    refuse("choice", text, "choice")


def test_a_model_without_an_end_follows_no_grammar() -> None:
    with pytest.raises(InvalidRequestError, match="ends an answer"):
        GrammarTokens(TOKENS, (), (), len(TOKENS))
    with pytest.raises(InvalidRequestError, match="ends an answer"):
        GrammarTokens(TOKENS, (), (len(TOKENS),), len(TOKENS))


HEAVY = {
    "deep expression": ("regex", "((a{1,1000}){1,1000}){1,1000}"),
    "many states": ("regex", "(a|b)*a(a|b){40}"),
    "wide": ("regex", "|".join(f"w{i}x" for i in range(8000))),
    "long forced text": ("regex", "a{100000}"),
    "ambiguous": ("lark", 'start: e\ne: e e | "a" | ""'),
    "repeated": ("lark", 'start: x{1000000}\nx: "a"'),
    "long string": ("json_schema", '{"type": "string", "maxLength": 1000000000}'),
    "many strings": ("json_schema", '{"type": "array", "minItems": 1000000, "items": {"type": "string"}}'),
    "many values": ("json_schema", json.dumps({"enum": [f"value number {i}" for i in range(20_000)]})),
    "doubling": (
        "json_schema",
        json.dumps(
            {
                "$defs": {
                    **{
                        f"a{i}": {
                            "type": "object",
                            "properties": {side: {"$ref": f"#/$defs/a{i + 1}"} for side in "lr"},
                            "required": ["l", "r"],
                        }
                        for i in range(60)
                    },
                    "a60": {"type": "null"},
                },
                "$ref": "#/$defs/a0",
            }
        ),
    ),
}


@pytest.mark.parametrize("name", HEAVY)
def test_heavy_grammars_take_bounded_time(name: str) -> None:
    """Compiling and the first masks: far below what the unbounded forms of these would take."""
    kind, value = HEAVY[name]
    start_s = time.monotonic()
    matcher = FACTORY.compile(StructuredOutput(kind, value)).start()  # type: ignore[arg-type]
    for _ in range(5):
        (mask,) = masks_of(FACTORY, [(matcher, ())])
        if matcher.error is not None or matcher.ended:
            break
        matcher.advance([int(index) for index in _allowed(mask)][:1])
    assert time.monotonic() - start_s < 60.0


def _allowed(mask: Any) -> list[int]:
    words = mask[0]
    return [32 * j + i for j in range(len(words)) for i in range(32) if int(words[j]) >> i & 1][-1:]


def test_stuck_rows_have_no_mask() -> None:
    """A grammar that wears out its bounds is an error of the row, never a row without a grammar."""
    matcher = FACTORY.compile(StructuredOutput("lark", 'start: x{1000000}\nx: "a"')).start()
    for _ in range(2000):
        (mask,) = masks_of(FACTORY, [(matcher, ())])
        if matcher.error is not None:
            break
        matcher.advance([int(index) for index in _allowed(mask)])
    assert matcher.error
    assert not mask.any()
    assert not masks_of(FACTORY, [(matcher, ())])[0].any()


def test_a_wrong_token_is_an_error_of_the_row() -> None:
    matcher = FACTORY.compile(StructuredOutput("choice", '["ab"]')).start()
    matcher.advance([TOKENS.index(b"x")])
    assert matcher.error
    assert not masks_of(FACTORY, [(matcher, ())])[0].any()


@pytest.mark.parametrize("above", [0, 6])
def test_a_refused_lark_grammar_is_not_quoted(above: int) -> None:
    """Clients of tools have not written the grammar, whose lines near the fault llguidance shows."""
    schema = '{"type": "object", "properties": {"a": {"$ref": "#", "type": "object"}}}'
    lark = "start: rule\n" + "// x\n" * above + f"rule: %json {schema}\n"
    refuse("lark", lark, r"circular references with sibling keys are not supported: json-schema:///#$")
