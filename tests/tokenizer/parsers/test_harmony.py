"""Answers in channels: reasoning, content and calls under every cutting, malformed messages, and their grammars."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realizar.errors import InvalidRequestError
from realizar.tokenizer.marks import HARMONY_MARKS
from realizar.tokenizer.parsers.base import ContentDelta, ReasoningDelta, ToolCallDelta
from realizar.tokenizer.parsers.choose import choose_parser, find_format
from realizar.tokenizer.parsers.grammar import call_grammar
from realizar.tokenizer.parsers.harmony import HARMONY, HarmonyParser
from tokenizer.parsers.grammar_walk import ByteVocabulary, allows, matcher, walk
from tokenizer.parsers.parsed_answers import Answer, cut, parse, parse_however_cut

TEMPLATE = "{{ tools }}<|start|>user<|message|>x<|end|><|start|>assistant<|channel|>analysis<|message|>"
FORM = find_format(TEMPLATE)
PROMPT_END = "user<|message|>x<|end|><|start|>assistant"
TOOLS: dict[str, dict[str, Any]] = {"get": {}, "now": {}}


def parser(prompt_end: str = PROMPT_END, **options: Any) -> HarmonyParser:
    return HarmonyParser(options.pop("tools", TOOLS), prompt_end, **options)


texts = st.text(st.characters(codec="utf-8"), max_size=20).filter(lambda text: "<|" not in text and text[-1:] != "<")
bodies = texts.filter(bool)
objects = st.dictionaries(st.text(max_size=4), st.none() | st.integers() | st.text(max_size=5), max_size=3)
cuts = st.lists(st.integers(0, 10**6), max_size=12)


@given(thoughts=st.lists(bodies, max_size=2), words=st.lists(bodies, max_size=2), given_arguments=objects, places=cuts)
@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.get <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.get<|constrain|>json<|message|>",
        "<|channel|>commentary to=get json<|message|>",
        " to=functions.get<|channel|>commentary json<|message|>",
        " to=functions.get<|channel|>commentary<|message|>",
        "<|channel|>analysis to=functions.get code<|message|>",
    ],
)
def test_channels(
    header: str, thoughts: list[str], words: list[str], given_arguments: dict[str, Any], places: list[int]
) -> None:
    messages = [f"<|channel|>analysis<|message|>{text}" for text in thoughts]
    messages += [f"<|channel|>commentary<|message|>{text}" for text in words]
    messages.append(header + json.dumps(given_arguments))
    text = "<|end|><|start|>assistant".join(messages)
    for end in ("", "<|call|>"):
        answer = parse(parser(), cut(text + end, places))
        assert answer.reasoning == "\n\n".join(thoughts)
        assert answer.content == "\n\n".join(words)
        assert answer.names == ["get"]
        assert json.loads(answer.arguments[0]) == given_arguments


SHARDS = (
    *("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>", "assistant"),
    *("analysis", "final", "commentary", " to=", "functions.get", "functions.nobody", "user", "json", '{"a": 1}'),
    *('{"a": ', "}", "text", " ", "\n", "<|", "<", "é", "<|channel|>final<|message|>", "?", "<|chan"),
)
soups = st.lists(st.sampled_from(SHARDS), max_size=16).map("".join)


@given(
    text=soups,
    places=cuts,
    begun=st.sampled_from(["", "<|channel|>final<|message|>", "<|channel|>"]),
    one=st.booleans(),
)
def test_every_way_of_cutting_is_the_same(text: str, places: list[int], begun: str, one: bool) -> None:
    prompt_end = PROMPT_END + begun
    parse_however_cut(lambda: parser(prompt_end, parallel=not one), text, places)


@given(before=soups, after=soups)
def test_nothing_is_lost(before: str, after: str) -> None:
    """Words anywhere come back somewhere, unless they stand in a message's header."""
    text = before + "<|end|> needle needle " + after
    answer = parse(parser(parallel=True), [text])
    assert "needle needle" in answer.content + answer.reasoning + "".join(answer.arguments)


START = "<|start|>assistant"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>final<|message|>Hi", Answer("Hi")),
        ("<|channel|>final<|message|>Hi<|return|>", Answer("Hi")),
        ("<|channel|>analysis<|message|>hm<|end|>", Answer("", "hm")),
        # Models forget marks, and write no channel at all.
        ("Hi", Answer("Hi")),
        ("<|message|>Hi", Answer("Hi")),
        ("<|channel|>analysis<|message|>hm<|end|>assistant<|channel|>final<|message|>Hi", Answer("Hi", "hm")),
        ("<|channel|>analysis<|message|>hm<|channel|>final<|message|>Hi", Answer("Hi", "hm")),
        ("<|channel|>analysis<|message|>hm<|start|>assistant<|channel|>final<|message|>Hi", Answer("Hi", "hm")),
        ("<|channel|>commentary?<|message|>Hi", Answer("Hi")),
        ("<|channel|>commentary to=assistant<|message|>Hi", Answer("Hi")),
        # Malformed messages are content as they were written; what follows is not lost.
        ("<|channel|>??<|end|>" + START + "<|channel|>analysis<|message|>hm", Answer("<|channel|>??<|end|>", "hm")),
        ("<|channel|>??<|channel|>analysis<|message|>hm", Answer("", "hm")),
        ("<|start|>user<|message|>Hi<|end|>", Answer("<|start|>user<|message|>Hi<|end|>")),
        ("<|channel|>" + "x" * 300, Answer("<|channel|>" + "x" * 300)),
        # Unknown functions and bodies that are no object are no calls.
        (
            "<|channel|>commentary to=functions.nobody <|constrain|>json<|message|>{}<|call|>",
            Answer("<|channel|>commentary to=functions.nobody <|constrain|>json<|message|>{}<|call|>"),
        ),
        (
            "<|channel|>commentary to=functions.get<|message|>[1]<|end|>",
            Answer("<|channel|>commentary to=functions.get<|message|>[1]<|end|>"),
        ),
        ("<|channel|>analysis to=python code<|message|>1+1<|call|>", Answer("", "1+1")),
        # Empty and broken arguments, text after them, calls one after the other.
        ("<|channel|>commentary to=functions.now<|message|>", Answer("", "", ["now"], ["{}"])),
        ("<|channel|>commentary to=functions.now<|message|><|call|>", Answer("", "", ["now"], ["{}"])),
        ('<|channel|>commentary to=functions.get<|message|>{"a": x<|end|>', Answer("", "", ["get"], ['{"a": x'])),
        ("<|channel|>commentary to=functions.get<|message|>{} b<|end|>", Answer("b", "", ["get"], ["{}"])),
        (
            "<|channel|>commentary to=functions.get<|message|>{}<|call|>"
            + START
            + " to=functions.now<|channel|>commentary<|message|>{}",
            Answer("", "", ["get", "now"], ["{}", "{}"]),
        ),
        # The answer ends within a header.
        ("<|channel|>", Answer()),
        ("<|channel|>analysis", Answer()),
        ("<|channel|>commentary to=functions.get <|constrain|>js", Answer()),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assi", Answer("", "hm")),
        ("<|channel|>not, a header", Answer("<|channel|>not, a header")),
    ],
)
def test_messages(text: str, expected: Answer) -> None:
    assert parse_however_cut(parser, text) == expected


def test_text_comes_as_it_is_written() -> None:
    stream = parser()
    assert stream.feed("<|channel|>analysis<|message|>h") == [ReasoningDelta("h")]
    assert stream.feed("m <|e") == [ReasoningDelta("m ")]
    assert stream.feed("nd|><|start|>assistant<|channel|>final<|message|>Hi") == [ContentDelta("Hi")]
    assert stream.feed(" there") == [ContentDelta(" there")]
    stream = parser()
    (opened,) = stream.feed('<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"a"')
    assert isinstance(opened, ToolCallDelta)
    assert (opened.name, opened.arguments) == ("get", '{"a"')
    assert stream.feed(': "b') == [ToolCallDelta(0, None, None, ': "b')]


def test_one_call_ends_the_answer() -> None:
    stream = parser(parallel=False)
    assert parse(stream, ["<|channel|>commentary to=functions.get<|message|>{}<|call|> more"]).names == ["get"]
    assert stream.ended


def test_prompt_that_begins_a_message() -> None:
    final = "<|channel|>final<|message|>"
    assert parse(parser(PROMPT_END + final), ['{"a": 1}']) == Answer('{"a": 1}')
    assert parse(parser(PROMPT_END + "<|channel|>analysis<|message|>"), ["hm"]) == Answer("", "hm")
    assert parse(parser("<|start|>assistant<|channel|>final<|message|>x<|end|>"), ["Hi"]) == Answer("Hi")


def test_chosen_by_the_template() -> None:
    assert FORM.in_channels
    assert FORM.style is HARMONY
    answer = "<|channel|>commentary to=functions.f<|message|>{}"
    assert parse(choose_parser(FORM, None, prompt_end=PROMPT_END), [answer]) == Answer(answer)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert parse(choose_parser(FORM, tools, prompt_end=PROMPT_END), [answer]) == Answer("", "", ["f"], ["{}"])


STRICT: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
                "required": ["n"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture
def vocabulary() -> ByteVocabulary:
    return ByteVocabulary(sorted(HARMONY_MARKS))


def test_vocabulary_without_the_marks() -> None:
    with pytest.raises(InvalidRequestError, match="lacks the marks"):
        call_grammar(FORM, STRICT, required=True, mark_ids={"<|end|>": 1})


def written(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}"


THOUGHT = "<|channel|>analysis<|message|>hm {\n<|end|>" + START
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|>" + START


def test_what_a_grammar_allows(vocabulary: ByteVocabulary) -> None:
    good, bad, other = written("get", '{"n": 7}'), written("get", '{"n": -7}'), written("now", "{}")
    forced = call_grammar(FORM, STRICT, required=True, mark_ids=vocabulary.ids)
    for text, allowed in (
        (good, True),
        (THOUGHT + good, True),
        (THOUGHT + PREAMBLE + other, True),
        (THOUGHT + bad, False),
        (written("nobody", "{}"), False),
        ("<|channel|>final<|message|>Hi", False),
        (THOUGHT, False),
        ("Hi", False),
    ):
        assert allows(forced, vocabulary, text) is allowed, text
    named = call_grammar(FORM, STRICT, name="now", parallel=False, mark_ids=vocabulary.ids)
    assert allows(named, vocabulary, THOUGHT + other)
    assert not allows(named, vocabulary, good)
    strict = call_grammar(FORM, STRICT, mark_ids=vocabulary.ids)
    for text, allowed in (
        ("<|channel|>final<|message|>Hi < there", True),
        (THOUGHT + "<|channel|>final<|message|>Hi {", True),
        (THOUGHT + good, True),
        (PREAMBLE + other, True),
        (THOUGHT + bad, False),
    ):
        assert allows(strict, vocabulary, text) is allowed, text


def test_whatever_a_grammar_allows_parses(vocabulary: ByteVocabulary) -> None:
    rng = random.Random(5)
    grammar = call_grammar(FORM, STRICT, required=True, mark_ids=vocabulary.ids)
    texts_walked = []
    for _ in range(12):
        match = matcher(grammar, vocabulary)
        start = vocabulary.encode("<|channel|>commentary to=functions.")
        assert all(match.consume_token(i) for i in start)
        texts_walked.append(vocabulary.decode([*start, *walk(match, vocabulary, rng, '"}')]))
    for text in texts_walked:
        answer = parse(parser(), list(text))
        assert answer.content == "", text
        (name,), (arguments,) = answer.names, answer.arguments
        assert name == "now" or 0 <= json.loads(arguments)["n"] <= 99
