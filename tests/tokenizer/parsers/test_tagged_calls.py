"""Calls with arguments between tags: types by the schema, every way of cutting, malformed ones, and their grammars."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realizar.errors import InvalidRequestError
from realizar.tokenizer.marks import MARKS, REASONING_MARKS
from realizar.tokenizer.parsers.base import ToolCallDelta
from realizar.tokenizer.parsers.choose import AnswerFormat
from realizar.tokenizer.parsers.grammar import call_grammar
from realizar.tokenizer.parsers.parser import AnswerParser
from realizar.tokenizer.parsers.styles import ToolStyle
from realizar.tokenizer.parsers.tagged_styles import GLM, GLM_DENSE, MINIMAX, QWEN3_CODER, SEED_OSS
from tokenizer.parsers.grammar_walk import ByteVocabulary, allows, matcher, walk
from tokenizer.parsers.parsed_answers import Answer, cut, parse, parse_however_cut

STYLES = {"glm": GLM, "glm dense": GLM_DENSE, "qwen": QWEN3_CODER, "seed": SEED_OSS, "minimax": MINIMAX}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "kind": {"$ref": "#/$defs/kind"},
        "count": {"type": "integer"},
        "ratio": {"type": ["number", "null"]},
        "sure": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "list": {"type": "array", "items": {}},
        "place": {"type": "object"},
    },
    "$defs": {"kind": {"enum": ["7", "true", "x y"]}},
}
TOOLS: dict[str, dict[str, Any]] = {"set": PARAMETERS, "f": {}, "now": {"type": "object", "properties": {}}}
ENDS = ("</arg_value>", "</parameter>")

texts = st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda text: not any(end in text for end in ENDS))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet="ab ", max_size=3), inner, max_size=3),
    max_leaves=5,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": texts | st.sampled_from(["7", "true", "null", "{}", "[1]", '"q"', "\n", " a\n", ""]),
        "kind": st.sampled_from(["7", "true", "x y"]),
        "count": st.integers(-(10**20), 10**20),
        "ratio": st.none() | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-9, 9),
        "sure": st.none() | st.booleans(),
        "list": st.lists(json_values, max_size=3),
        "place": st.dictionaries(st.text(alphabet="ab ", max_size=3), json_values, max_size=3),
    },
)
calls_made = st.lists(st.tuples(st.just("set"), arguments) | st.just(("now", {})), min_size=1, max_size=3)
cuts = st.lists(st.integers(0, 10**6), max_size=12)


def _text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def written(style: ToolStyle, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as the models of a style write them."""
    if style in (GLM, GLM_DENSE):
        line = "" if style is GLM_DENSE else "\n"
        each = [
            f"<tool_call>{name}{line}"
            + "".join(
                f"<arg_key>{key}</arg_key>{line}<arg_value>{_text_of(value)}</arg_value>{line}"
                for key, value in given.items()
            )
            + "</tool_call>"
            for name, given in calls
        ]
        return line.join(each)
    if style is MINIMAX:
        each = [
            f'<invoke name="{name}">\n'
            + "".join(f'<parameter name="{key}">{_text_of(value)}</parameter>\n' for key, value in given.items())
            + "</invoke>\n"
            for name, given in calls
        ]
        return f"<minimax:tool_call>\n{''.join(each)}</minimax:tool_call>"
    mark, line = ("seed:tool_call", "") if style is SEED_OSS else ("tool_call", "\n")
    each = [
        f"<{mark}>\n<function={name}>\n"
        + "".join(f"<parameter={key}>{line}{_text_of(value)}{line}</parameter>\n" for key, value in given.items())
        + f"</function>\n</{mark}>"
        for name, given in calls
    ]
    return "\n".join(each)


def parser(style: ToolStyle, **options: Any) -> AnswerParser:
    return AnswerParser(options.pop("reasoning", None), style, TOOLS, **options)


@pytest.mark.parametrize("name", STYLES)
@settings(max_examples=80)
@given(calls=calls_made, places=cuts)
def test_calls_by_their_schema(name: str, calls: list[tuple[str, dict[str, Any]]], places: list[int]) -> None:
    style = STYLES[name]
    text = f"Let me look.\n{written(style, calls)}\n"
    answer = parse(parser(style), cut(text, places))
    found = [(n, json.loads(a)) for n, a in zip(answer.names, answer.arguments, strict=True)]
    assert found == calls
    for (_, given_arguments), (_, value) in zip(calls, found, strict=True):
        assert [type(each) for each in value.values()] == [type(each) for each in given_arguments.values()]
    assert answer.content == "Let me look."


SHARDS = (
    *("<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>", "<minimax:tool_call>", "<tool_c"),
    *(
        "</minimax:tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<function=set>",
        "</function>",
    ),
    *("</function>", "<function=", "<parameter=count>", "<parameter=text>", "</parameter>", "</invoke>"),
    *(
        '<parameter name="text">',
        "set",
        "now",
        "nobody",
        "text",
        "count",
        "12",
        "\n",
        " ",
        ">",
        "<",
        "</",
        '"',
        "é",
        "\\",
    ),
    *("<think>", "</think>", "{", "null"),
)
soups = st.lists(st.sampled_from(SHARDS), max_size=16).map("".join)


@given(
    style=st.sampled_from(list(STYLES.values())),
    text=soups,
    places=cuts,
    reasoning=st.booleans(),
    parallel=st.booleans(),
)
def test_every_way_of_cutting_is_the_same(
    style: ToolStyle, text: str, places: list[int], reasoning: bool, parallel: bool
) -> None:
    options: dict[str, Any] = {"reasoning": REASONING_MARKS[0] if reasoning else None, "parallel": parallel}
    whole = parse_however_cut(lambda: parser(style, **options), text, places)
    if not whole.names and not reasoning:
        assert whole.content == text


@given(style=st.sampled_from(list(STYLES.values())), calls=calls_made, junk=soups, where=st.integers(0, 10**6))
def test_nothing_is_lost(style: ToolStyle, calls: list[tuple[str, dict[str, Any]]], junk: str, where: int) -> None:
    """Words put anywhere into calls come back somewhere, and arguments stay JSON unless the answer ends in them."""
    text = written(style, calls)
    at = where % len(text)
    answer = parse(parser(style), [f"{text[:at]} needle {junk}{text[at:]}"])
    out = answer.content + "".join(answer.arguments)
    assert "needle" in out
    for arguments_text in answer.arguments[:-1]:
        assert isinstance(json.loads(arguments_text), dict)


GLM_START = "<tool_call>set\n<arg_key>text</arg_key>\n<arg_value>"
QWEN_START = "<tool_call>\n<function=set>\n<parameter=text>\n"
QWEN_END = "</function>\n</tool_call>"
MINIMAX_START = '<minimax:tool_call>\n<invoke name="set">\n<parameter name="text">'


@pytest.mark.parametrize(
    ("style", "text", "expected"),
    [
        # The answer ends inside a call: what came of a value stays its own.
        (GLM, GLM_START + "on", Answer("", "", ["set"], ['{"text": "on'])),
        (GLM, "<tool_call>set\n<arg_key>count</arg_key><arg_value>12", Answer("", "", ["set"], ['{"count": 12'])),
        (GLM, GLM_START + "a</arg_value>", Answer("", "", ["set"], ['{"text": "a"}'])),
        (GLM, "<tool_call>set", Answer("<tool_call>set")),
        # It ends inside the first name: it is no call. Inside a later one the arguments stay open, so that nobody takes
        # them for whole.
        (GLM, "<tool_call>set\n<arg_key>te", Answer("<tool_call>set\n<arg_key>te")),
        (
            QWEN3_CODER,
            QWEN_START + "a\n</parameter>\n<parameter=co",
            Answer("", "", ["set"], ['{"text": "a\\n</parameter>\\n<parameter=co']),
        ),
        (QWEN3_CODER, QWEN_START + "a\n", Answer("", "", ["set"], ['{"text": "a\\n'])),
        # No tool of this name; no call at all.
        (GLM, "<tool_call>nobody\n</tool_call>", Answer("<tool_call>nobody\n</tool_call>")),
        (GLM, "<tool_call>set the table</tool_call>", Answer("<tool_call>set the table</tool_call>")),
        (QWEN3_CODER, '<tool_call>\n{"name": "f"}', Answer('<tool_call>\n{"name": "f"}')),
        (MINIMAX, "<minimax:tool_call>\n<invoke>", Answer("<minimax:tool_call>\n<invoke>")),
        # Tags within a value: it goes on where the call does neither go on nor end behind them.
        (
            GLM,
            GLM_START + "a</arg_value>\n<arg_key>b</tool_call> c",
            Answer("", "", ["set"], ['{"text": "a</arg_value>\\n<arg_key>b</tool_call> c']),
        ),
        (
            QWEN3_CODER,
            QWEN_START + "a\n</parameter>\noops",
            Answer("", "", ["set"], ['{"text": "a\\n</parameter>\\noops']),
        ),
        (
            QWEN3_CODER,
            QWEN_START + "a </parameter> b\n</parameter>\n<parameter=count>\n5\n</parameter>\n" + QWEN_END,
            Answer("", "", ["set"], ['{"text": "a </parameter> b", "count": 5}']),
        ),
        (
            QWEN3_CODER,
            QWEN_START + "a\n</parameter>\n" + QWEN_END + " b\n</parameter>\n" + QWEN_END,
            Answer("", "", ["set"], [json.dumps({"text": "a\n</parameter>\n" + QWEN_END + " b"})]),
        ),
        (
            QWEN3_CODER,
            QWEN_START + "a\n<parameter=count>\nb\n</parameter>\n<parameter=count>\n5\n</parameter>\n" + QWEN_END,
            Answer("", "", ["set"], ['{"text": "a\\n<parameter=count>\\nb", "count": 5}']),
        ),
        (
            MINIMAX,
            MINIMAX_START + "<b>bold</b>\n</parameter>\n</invoke>\n</minimax:tool_call>",
            Answer("", "", ["set"], ['{"text": "<b>bold</b>\\n"}']),
        ),
        # A closing tag is missing, or has another name.
        (QWEN3_CODER, QWEN_START + "a\n" + QWEN_END, Answer("", "", ["set"], ['{"text": "a"}'])),
        (QWEN3_CODER, QWEN_START + "a\n</parameter>\n</tool_call>", Answer("", "", ["set"], ['{"text": "a"}'])),
        (QWEN3_CODER, QWEN_START + "a\n</text>\n" + QWEN_END, Answer("", "", ["set"], ['{"text": "a"}'])),
        (
            QWEN3_CODER,
            QWEN_START + "a\n</arg_value>\n<parameter=count>\n5\n</parameter>\n" + QWEN_END,
            Answer("", "", ["set"], ['{"text": "a", "count": 5}']),
        ),
        (
            QWEN3_CODER,
            QWEN_START + "a\n\n<parameter=count>\n5\n\n" + QWEN_END,
            Answer("", "", ["set"], ['{"text": "a", "count": 5}']),
        ),
        (
            GLM,
            GLM_START + "a\n<arg_key>count\n<arg_value>5</value>\n</tool_call>",
            Answer("", "", ["set"], ['{"text": "a", "count": 5}']),
        ),
        (
            MINIMAX,
            MINIMAX_START + 'a</text>\n<parameter name="count">5\n</invoke>\n</minimax:tool_call>',
            Answer("", "", ["set"], ['{"text": "a", "count": 5}']),
        ),
        (QWEN3_CODER, "<tool_call>\n<function=now>\n</tool_call>", Answer("", "", ["now"], ["{}"])),
        # Words behind the call are content, once no other end follows them.
        (
            QWEN3_CODER,
            QWEN_START + "a\n</parameter>\n" + QWEN_END + "\nThat is all.",
            Answer("That is all.", "", ["set"], ['{"text": "a"}']),
        ),
        # Without the mark around it, and several within one.
        (QWEN3_CODER, "<function=now>\n</function>\n</tool_call>", Answer("", "", ["now"], ["{}"])),
        (
            MINIMAX,
            '<minimax:tool_call><invoke name="now"></invoke><invoke name="nobody"></invoke></minimax:tool_call>',
            Answer('<invoke name="nobody"></invoke></minimax:tool_call>', "", ["now"], ["{}"]),
        ),
    ],
)
def test_malformed_and_cut_short(style: ToolStyle, text: str, expected: Answer) -> None:
    assert parse_however_cut(lambda: parser(style), text) == expected


@pytest.mark.parametrize(
    ("name", "key", "text", "expected"),
    [
        ("set", "sure", "True", "true"),
        ("set", "ratio", "None", "null"),
        ("set", "count", "ten", '"ten"'),
        ("set", "count", "NaN", '"NaN"'),
        ("set", "count", "9" * 5000, json.dumps("9" * 5000)),
        ("set", "count", "3.0", "3.0"),
        ("set", "count", "3.5", '"3.5"'),
        ("set", "list", "{}", '"{}"'),
        ("set", "list", "[" * 10_000, json.dumps("[" * 10_000)),
        ("f", "a", " 5 ", "5"),
        ("f", "a", '"quoted"', json.dumps('"quoted"')),
    ],
)
def test_value_of_another_type(name: str, key: str, text: str, expected: str) -> None:
    """Python's words are read, and what is not of the schema's type is a string: nothing is lost."""
    answer = parse(parser(GLM), [f"<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{text}</arg_value>"])
    assert answer.arguments == [f'{{"{key}": {expected}}}']


def test_strings_come_as_they_are_written() -> None:
    stream = parser(QWEN3_CODER)
    assert stream.feed("<tool_call>\n<function=set>\n<parameter=te") == []
    (opened,) = stream.feed('xt>\nsay "hi')
    assert isinstance(opened, ToolCallDelta)
    assert (opened.name, opened.arguments) == ("set", '{"text": "say \\"hi')
    assert stream.feed("\n") == [], "it may end the value"
    assert stream.feed("\n</param") == []
    assert stream.feed("eter>\n</function>\n</tool_call>") == []
    assert stream.finish() == [ToolCallDelta(0, None, None, '\\n"}')], "the value could have gone on"
    stream = parser(GLM)
    stream.feed("<tool_call>set\n<arg_key>count</arg_key>\n<arg_value>")
    assert stream.feed("12") == [], "its type is known at its end"
    assert stream.feed("3</arg_value>") == []
    assert stream.feed("<arg_key>text</arg_key><arg_value>a") == [ToolCallDelta(0, None, None, '123, "text": "a')]


@pytest.mark.parametrize("name", STYLES)
def test_one_call_ends_the_answer(name: str) -> None:
    stream = parser(STYLES[name], parallel=False)
    answer = parse(stream, list(written(STYLES[name], [("set", {"count": 1}), ("now", {})])))
    assert (answer.names, answer.arguments) == (["set"], ['{"count": 1}'])
    assert stream.ended


def test_a_schema_of_circles_is_read_once() -> None:
    circle = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 40 + [{"type": "integer"}]}}}
    schema = {"properties": {"x": {"anyOf": [{"$ref": "#/$defs/a"}] * 40}, "y": {"$ref": "#/properties/y"}}, **circle}
    text = "<tool_call>g<arg_key>x</arg_key><arg_value>5</arg_value><arg_key>y</arg_key><arg_value>a</arg_value>"
    answer = parse(AnswerParser(None, GLM, {"g": schema}), [text])
    assert answer.arguments == ['{"x": 5, "y": "a"}']


STRICT: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "set",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "kind": {"$ref": "#/$defs/kind"},
                    "count": {"type": "integer", "minimum": 0, "maximum": 99},
                    "text": {"type": "string"},
                },
                "required": ["kind", "count"],
                "additionalProperties": False,
                "$defs": {"kind": {"enum": ["x", "y z", 5]}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(params=[False, True], ids=["marks are text", "marks are control tokens"])
def vocabulary(request: pytest.FixtureRequest) -> ByteVocabulary:
    return ByteVocabulary(sorted(MARKS) if request.param else [])


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("reasoning", [None, REASONING_MARKS[0]], ids=["", "reasoning"])
def test_what_a_grammar_allows(name: str, reasoning: Any, vocabulary: ByteVocabulary) -> None:
    style = STYLES[name]
    form = AnswerFormat(style, reasoning)
    good = ("set", {"kind": "y z", "count": 7})
    more = ("set", {"kind": 5, "count": 7, "text": 'a "b"\n<c> </d>\n'})
    bad, other = ("set", {"kind": "z", "count": 7}), ("now", {})
    forced = call_grammar(form, STRICT, required=True, mark_ids=vocabulary.ids)
    for calls, allowed in (
        ([good], True),
        ([more], True),
        ([more, other, good], True),
        ([bad], False),
        ([("set", {"kind": "x"})], False),
        ([("set", {"kind": "x", "count": 100})], False),
        ([("nobody", {})], False),
    ):
        assert allows(forced, vocabulary, written(style, calls)) is allowed, calls
    assert not allows(forced, vocabulary, "Hello")
    thought = "<think>hm</think>\n\n" + written(style, [good])
    assert allows(forced, vocabulary, thought) is (reasoning is not None)
    named = call_grammar(form, STRICT, name="now", parallel=False, mark_ids=vocabulary.ids)
    assert allows(named, vocabulary, written(style, [other]))
    assert not allows(named, vocabulary, written(style, [good]))
    strict = call_grammar(form, STRICT, mark_ids=vocabulary.ids)
    for text, allowed in (
        ("Hello <there>, {a}\n", True),
        ("Look:\n" + written(style, [good]), True),
        ("Look:\n" + written(style, [bad]), False),
    ):
        assert allows(strict, vocabulary, text) is allowed, text


@pytest.mark.parametrize("name", STYLES)
def test_whatever_a_grammar_allows_parses(name: str, vocabulary: ByteVocabulary) -> None:
    rng = random.Random(5)
    tools = copy.deepcopy(STRICT)
    del tools[0]["function"]["parameters"]["properties"]["text"]  # which ends at a long mark that chance does not write
    schemas: dict[str, dict[str, Any]] = {
        tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools
    }
    grammar = call_grammar(AnswerFormat(STYLES[name], None), tools, required=True, mark_ids=vocabulary.ids)
    for _ in range(8):
        text = vocabulary.decode(walk(matcher(grammar, vocabulary), vocabulary, rng, '"}]></\n'))
        answer = parse(AnswerParser(None, STYLES[name], schemas), list(text))
        assert answer.content == "", text
        assert answer.names
        for called, arguments_text in zip(answer.names, answer.arguments, strict=True):
            value = json.loads(arguments_text)
            if called == "set":
                assert set(value) == {"kind", "count"}
                assert value["kind"] in ("x", "y z", 5)
                assert 0 <= value["count"] <= 99


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "^x$"}}}, "'pattern'"),
        ({"properties": {"a": {"type": ["string", "object"]}}}, "a text beside"),
        ({"properties": {"a": {"enum": ["x", "</arg_value>"]}}}, "a value with </arg_value> in it"),
        ({"anyOf": [{"properties": {}}]}, "'anyOf'"),
    ],
)
def test_schema_that_cannot_be_enforced(parameters: dict[str, Any], named: str) -> None:
    """It is refused for a strict tool, and passed over for another."""
    function = {"name": "f", "parameters": {"type": "object", **parameters}}
    form = AnswerFormat(GLM, None)
    with pytest.raises(InvalidRequestError, match=named):
        call_grammar(form, [{"type": "function", "function": {**function, "strict": True}}], required=True)
    vocabulary = ByteVocabulary([])
    matcher(call_grammar(form, [{"type": "function", "function": function}], required=True), vocabulary)


def test_arguments_without_names_in_the_schema() -> None:
    free = {"name": "f", "parameters": {"type": "object", "additionalProperties": True}}
    grammar = call_grammar(AnswerFormat(GLM, None), [{"type": "function", "function": free}], required=True)
    assert allows(grammar, ByteVocabulary([]), written(GLM, [("f", {"any": "thing", "else": 5})]))
