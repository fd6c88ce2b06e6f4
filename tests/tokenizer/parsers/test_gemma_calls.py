"""Calls in Gemma 4's notation: as its template writes them, under every cutting, malformed ones, and their grammars."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realizar.errors import InvalidRequestError
from realizar.structured.grammar import GrammarFactory
from realizar.structured.grammar_tokens import GrammarTokens
from realizar.tokenizer.marks import MARKS, REASONING_MARKS
from realizar.tokenizer.parsers.base import ToolCallDelta
from realizar.tokenizer.parsers.choose import AnswerFormat
from realizar.tokenizer.parsers.gemma import GEMMA, gemma_text
from realizar.tokenizer.parsers.grammar import call_grammar
from realizar.tokenizer.parsers.parser import AnswerParser
from realizar.tokenizer.tokenizer import Tokenizer
from tokenizer.parsers.grammar_walk import ByteVocabulary, allows, matcher, walk
from tokenizer.parsers.parsed_answers import Answer, cut, parse, parse_however_cut

THOUGHT = next(marks for marks in REASONING_MARKS if marks.end == "<channel|>")
TOOLS: dict[str, dict[str, Any]] = {"set": {}, "now": {}}

texts = st.text(st.characters(codec="utf-8"), max_size=10).filter(lambda text: '<|"|>' not in f'<|"|>{text}<|"|'[4:])
keys = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
    | st.sampled_from(["7", "null", "a,b}", "]{", "<tool_call|>", "true"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)
calls_made = st.lists(
    st.tuples(st.sampled_from(sorted(TOOLS)), st.dictionaries(keys, values, max_size=3)), min_size=1, max_size=3
)
cuts = st.lists(st.integers(0, 10**6), max_size=12)


def written(calls: list[tuple[str, dict[str, Any]]]) -> str:
    return "".join(f"<|tool_call>call:{name}{gemma_text(given)}<tool_call|>" for name, given in calls)


def parser(**options: Any) -> AnswerParser:
    return AnswerParser(options.pop("reasoning", THOUGHT), GEMMA, TOOLS, **options)


@settings(max_examples=80)
@given(calls=calls_made, places=cuts)
def test_calls_are_json(calls: list[tuple[str, dict[str, Any]]], places: list[int]) -> None:
    text = f"<|channel>thought\nLook it up.\n<channel|>I look.{written(calls)}"
    answer = parse(parser(), cut(text, places))
    assert [(n, json.loads(a)) for n, a in zip(answer.names, answer.arguments, strict=True)] == calls
    assert (answer.reasoning, answer.content) == ("Look it up.", "I look.")


SHARDS = (
    *("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_call>call:set{", "call:", "set", "now", "nobody", "{"),
    *(
        "}",
        "[",
        "]",
        ":",
        ",",
        "a",
        "12",
        "null",
        "None",
        '"',
        "\\",
        " ",
        "\n",
        "<|channel>thought",
        "<channel|>",
        "<|",
    ),
    *("|>", "<", "é"),
)
soups = st.lists(st.sampled_from(SHARDS), max_size=16).map("".join)


@given(text=soups, places=cuts, reasoning=st.booleans(), parallel=st.booleans())
def test_every_way_of_cutting_is_the_same(text: str, places: list[int], reasoning: bool, parallel: bool) -> None:
    options: dict[str, Any] = {"reasoning": THOUGHT if reasoning else None, "parallel": parallel}
    whole = parse_however_cut(lambda: parser(**options), text, places)
    if not whole.names and not reasoning:
        assert whole.content == text


@given(calls=calls_made, junk=soups, where=st.integers(0, 10**6))
def test_nothing_is_lost(calls: list[tuple[str, dict[str, Any]]], junk: str, where: int) -> None:
    """Words put anywhere into calls come back somewhere."""
    text = written(calls)
    at = where % len(text)
    answer = parse(parser(reasoning=None), [f"{text[:at]} needle {junk}{text[at:]}"])
    assert "needle" in answer.content + "".join(answer.arguments)


CALL = "<|tool_call>call:set"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CALL + "{}<tool_call|>", Answer("", "", ["set"], ["{}"])),
        (CALL + '{a:<|"|>on', Answer("", "", ["set"], ['{"a": "on'])),
        (CALL + "{a:12", Answer("", "", ["set"], ['{"a": 12'])),
        (CALL + "{a:hello wor", Answer("", "", ["set"], ['{"a": "hello wor'])),
        (CALL + "{a:hello world,b:None}<tool_call|>", Answer("", "", ["set"], ['{"a": "hello world", "b": null}'])),
        (CALL + '{"a": "x", <|"|>b<|"|>:[ 1 , 2 ] }<tool_call|>', Answer("", "", ["set"], ['{"a": "x", "b": [1, 2]}'])),
        (CALL + "{a:1}} b", Answer("} b", "", ["set"], ['{"a": 1}'])),
        (CALL + '{<|"|>key<|"|> x:1}<tool_call|>', Answer("", "", ["set"], ['{<|"|>key<|"|> x:1}'])),
        (CALL + "{a:[1}, more<tool_call|> b", Answer("b", "", ["set"], ['{"a": [1}, more'])),
        # Python's quotes, and quotes that the call does not go on behind.
        (CALL + "{a:['ds_1', 'it\\'s']}<tool_call|>", Answer("", "", ["set"], ['{"a": ["ds_1", "it\'s"]}'])),
        (CALL + "{'a':'x',b:'y, z'}<tool_call|>", Answer("", "", ["set"], ['{"a": "x", "b": "y, z"}'])),
        (CALL + "{a:it's,b:1}<tool_call|>", Answer("", "", ["set"], ['{"a": "it\'s", "b": 1}'])),
        (CALL + '{a:<|"|>x <|"|>, y<|"|>,b:1}<tool_call|>', Answer("", "", ["set"], ['{"a": "x <|\\"|>, y", "b": 1}'])),
        (CALL + '{a:<|"|>x<|"|>}<tool_call|> y<|"|>}<tool_call|>',
         Answer("", "", ["set"], ['{"a": "x<|\\"|>}<tool_call|> y"}'])),
        (CALL + '{a:<|"|>x<|"|>}<tool_call|> y', Answer("y", "", ["set"], ['{"a": "x"}'])),
        (CALL + "{a:1,a:2}<tool_call|>", Answer("", "", ["set"], ['{"a": 1, a:2}'])),
        (CALL + "(1)<tool_call|>", Answer(CALL + "(1)<tool_call|>")),
        ("<|tool_call>call:nobody{}<tool_call|>", Answer("<|tool_call>call:nobody{}<tool_call|>")),
        ("<|tool_call>set{}", Answer("<|tool_call>set{}")),
        ("<|channel>thought\n<channel|>Hi", Answer("Hi")),
        ("<|channel>other\n<channel|>Hi", Answer("<|channel>other\n<channel|>Hi")),
    ],
)  # fmt: skip
def test_malformed_and_cut_short(text: str, expected: Answer) -> None:
    assert parse_however_cut(parser, text) == expected


def test_strings_come_as_they_are_written() -> None:
    stream = parser()
    stream.feed(CALL + "{te")
    assert stream.feed('xt:<|"|>say "hi') == [ToolCallDelta(0, None, None, '"text": "say \\"hi')]
    assert stream.feed("\n") == [ToolCallDelta(0, None, None, "\\n")]
    assert stream.feed('<|"|>,n:1') == [ToolCallDelta(0, None, None, '", "n": ')]
    assert stream.feed("2}") == [ToolCallDelta(0, None, None, "12}")]


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
                    "tree": {"$ref": "#/$defs/tree"},
                    "text": {"type": ["string", "null"]},
                },
                "required": ["kind", "count"],
                "additionalProperties": False,
                "$defs": {
                    "kind": {"enum": ["x", "y z", 5]},
                    "tree": {
                        "type": "object",
                        "properties": {
                            "leaf": {"type": "boolean"},
                            "more": {"items": {"$ref": "#/$defs/tree"}, "type": "array"},
                        },
                        "required": ["leaf"],
                        "additionalProperties": False,
                    },
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "free", "parameters": {"type": "object", "additionalProperties": True}}},
]  # fmt: skip


@pytest.fixture(params=[False, True], ids=["marks are text", "marks are control tokens"])
def byte_vocabulary(request: pytest.FixtureRequest) -> ByteVocabulary:
    return ByteVocabulary(sorted(mark for mark in MARKS if "thought" not in mark) if request.param else [])


def test_what_a_grammar_allows(byte_vocabulary: ByteVocabulary) -> None:
    form = AnswerFormat(GEMMA, THOUGHT)
    good = ("set", {"kind": "y z", "count": 7})
    more = (
        "set",
        {"kind": 5, "count": 7, "text": 'a "b"\n<c> </d>\n', "tree": {"leaf": True, "more": [{"leaf": False}]}},
    )
    bad, other = ("set", {"kind": "z", "count": 7}), ("now", {})
    forced = call_grammar(form, STRICT, required=True, mark_ids=byte_vocabulary.ids)
    for calls, allowed in (
        ([good], True),
        ([more], True),
        ([("set", {"kind": "x", "count": 1, "text": None})], True),
        ([more, other, good], True),
        ([bad], False),
        ([("set", {"kind": "x"})], False),
        ([("set", {"kind": "x", "count": 100})], False),
        ([("set", {"kind": "x", "count": 1, "tree": {"more": []}})], False),
        ([("set", {"kind": "x", "count": 1, "other": 1})], False),
        ([("now", {"a": 1})], False),
        ([("free", {"a": [1.5, {"b": None, "c": "d"}]})], True),
        ([("nobody", {})], False),
    ):
        assert allows(forced, byte_vocabulary, written(calls)) is allowed, calls
    assert not allows(forced, byte_vocabulary, "Hello")
    assert allows(forced, byte_vocabulary, "<|channel>thought\nhm\n<channel|>" + written([good]))
    named = call_grammar(form, STRICT, name="now", parallel=False, mark_ids=byte_vocabulary.ids)
    assert allows(named, byte_vocabulary, written([other]))
    assert not allows(named, byte_vocabulary, written([good]))
    strict = call_grammar(form, STRICT, mark_ids=byte_vocabulary.ids)
    for text, allowed in (
        ("Hello <there>, {a}\n", True),
        ("Look:\n" + written([good]), True),
        ("Look:\n" + written([bad]), False),
    ):
        assert allows(strict, byte_vocabulary, text) is allowed, text


def test_whatever_a_grammar_allows_parses(byte_vocabulary: ByteVocabulary) -> None:
    rng = random.Random(5)
    tools = json.loads(json.dumps(STRICT[:2]))
    del tools[0]["function"]["parameters"]["properties"]["text"]  # which ends at a mark that chance does not write
    grammar = call_grammar(AnswerFormat(GEMMA, None), tools, required=True, mark_ids=byte_vocabulary.ids)
    for _ in range(12):
        text = byte_vocabulary.decode(walk(matcher(grammar, byte_vocabulary), byte_vocabulary, rng, "}]"))
        answer = parse(AnswerParser(None, GEMMA, TOOLS), list(text))
        assert answer.content == "", text
        assert answer.names
        for called, arguments_text in zip(answer.names, answer.arguments, strict=True):
            value = json.loads(arguments_text)
            if called == "set":
                assert {"kind", "count"} <= set(value) <= {"kind", "count", "tree"}
                assert value["kind"] in ("x", "y z", 5)
                assert 0 <= value["count"] <= 99


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "string", "maxLength": 3}, "'maxLength'"),
        ({"type": "array", "items": {}, "minItems": 1}, "'minItems'"),
        (json.loads('{"type": "array", "items": ' * 40 + "{}" + "}" * 40), "more than 32 levels"),
    ],
)
def test_schema_that_cannot_be_enforced(schema: dict[str, Any], named: str) -> None:
    """It is refused for a strict tool, and passed over for another."""
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
    form = AnswerFormat(GEMMA, None)
    with pytest.raises(InvalidRequestError, match=named):
        call_grammar(form, [{"type": "function", "function": {**function, "strict": True}}], required=True)
    matcher(call_grammar(form, [{"type": "function", "function": function}], required=True), ByteVocabulary([]))


def test_forced_call_over_the_real_vocabulary(tokenizer_of: Callable[[str], Tokenizer]) -> None:
    """There the marks are user-defined tokens, and a call's marks in ordinary tokens are none."""
    model = tokenizer_of("gemma-4")
    special = model.special_ids.union(model.answer_marks.values())
    tokens = GrammarTokens(model.vocabulary_bytes(), special, model.eos_ids, model.vocab_size)
    factory = GrammarFactory(tokens)
    made = written([("set", {"count": 7, "kind": "y z", "text": 'a "b", {c}'})])
    for required in (True, False):
        structured = call_grammar(AnswerFormat(GEMMA, THOUGHT), STRICT, required=required, mark_ids=model.answer_marks)
        assert structured is not None
        grammar = factory.compile(structured)
        for text, error in (
            (f"<|channel>thought\nhm\n<channel|>{made}<|tool_response>", False),
            (made + made + "<turn|>", False),
            (made.replace("7", "700") + "<turn|>", True),
            ("Hi<turn|>", required),
        ):
            row = grammar.start(model.encode(text, add_special=False))
            assert (row.error is not None) is error, text
            assert row.ended is not error
        spelled = [index for char in made for index in model.encode(char, add_special=False)]
        row = grammar.start([*spelled, *model.encode("<turn|>", add_special=False)])
        assert (row.error is not None) is required, "it is a text"
