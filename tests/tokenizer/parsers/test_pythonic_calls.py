"""Calls written as in Python: under every cutting, malformed ones, templates that ask for them, and their grammars."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realizar.tokenizer.marks import MARKS, REASONING_MARKS
from realizar.tokenizer.parsers.base import ToolCallDelta
from realizar.tokenizer.parsers.choose import AnswerFormat, find_format
from realizar.tokenizer.parsers.grammar import call_grammar
from realizar.tokenizer.parsers.parser import AnswerParser
from realizar.tokenizer.parsers.pythonic import PYTHONIC
from realizar.tokenizer.templates.chat_template import ChatTemplate
from tokenizer.parsers.grammar_walk import ByteVocabulary, allows
from tokenizer.parsers.parsed_answers import Answer, assemble, cut, parse, parse_however_cut
from tokenizer.templates.test_chat_template import tokenizer

THINK = REASONING_MARKS[0]
TOOLS: dict[str, dict[str, Any]] = {"set": {}, "now": {}}
START, END = "<|tool_call_start|>", "<|tool_call_end|>"

texts = st.text(st.characters(codec="utf-8"), max_size=10)
keys = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
    | st.sampled_from(["7", "None", "a,b}", "]{", END, "it's", '"', "\\n", "C:\\x41", "'), "]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)
calls_made = st.lists(
    st.tuples(st.sampled_from(sorted(TOOLS)), st.dictionaries(keys, values, max_size=3)), min_size=1, max_size=3
)
cuts = st.lists(st.integers(0, 10**6), max_size=12)


def written(calls: list[tuple[str, dict[str, Any]]], write: Any = repr) -> str:
    made = (f"{name}({', '.join(f'{key}={write(each)}' for key, each in given.items())})" for name, given in calls)
    return f"{START}[{', '.join(made)}]{END}"


def parser(**options: Any) -> AnswerParser:
    return AnswerParser(options.pop("reasoning", THINK), PYTHONIC, TOOLS, **options)


@settings(max_examples=80)
@given(calls=calls_made, places=cuts, in_python=st.booleans())
def test_calls_are_json(calls: list[tuple[str, dict[str, Any]]], places: list[int], in_python: bool) -> None:
    """As Python writes its values, and as JSON is written."""
    text = f"<think>\nLook it up.\n</think>\nI look.{written(calls, repr if in_python else json.dumps)}"
    answer = parse(parser(), cut(text, places))
    assert [(n, json.loads(a)) for n, a in zip(answer.names, answer.arguments, strict=True)] == calls
    assert (answer.reasoning, answer.content) == ("Look it up.", "I look.")


SHARDS = (
    START, END, f"{START}[set(", "set", "now", "nobody", "(", ")", "[", "]", "{", "}", "=", ":", ",", "a", "12", "None",
    "'", '"', "\\", "\\u00", " ", "\n", "<think>", "</think>", "<|", "|>", "<", "é",
)  # fmt: skip
soups = st.lists(st.sampled_from(SHARDS), max_size=16).map("".join)


@given(text=soups, places=cuts, reasoning=st.booleans(), parallel=st.booleans())
def test_every_way_of_cutting_is_the_same(text: str, places: list[int], reasoning: bool, parallel: bool) -> None:
    options: dict[str, Any] = {"reasoning": THINK if reasoning else None, "parallel": parallel}
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


CALL = f"{START}[set"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{CALL}()]{END}", Answer("", "", ["set"], ["{}"])),
        (f"{CALL}(a='on", Answer("", "", ["set"], ['{"a": "on'])),
        (f"{CALL}(a=12", Answer("", "", ["set"], ['{"a": 12'])),
        (f"{CALL}(a='it's so', b=True)]{END}", Answer("", "", ["set"], ['{"a": "it\'s so", "b": true}'])),
        (f"{CALL}(a=hello world,b=None,)]{END}", Answer("", "", ["set"], ['{"a": "hello world", "b": null}'])),
        (f"{CALL}(a = (1, [2,], ), b={{'k': 'v', \"l\": {{}}}})]{END}",
         Answer("", "", ["set"], ['{"a": [1, [2]], "b": {"k": "v", "l": {}}}'])),
        (f"{CALL}(a='\\x41\\u00e9\\q\\\\')]{END}", Answer("", "", ["set"], ['{"a": "Aé\\\\q\\\\"}'])),
        # A quote ends a text only where the call goes on behind it.
        (f"{CALL}(a='x'<|y')]{END}", Answer("", "", ["set"], ['{"a": "x\'<|y"}'])),
        (f"{CALL}(a='x', y', b='z')]{END}", Answer("", "", ["set"], ['{"a": "x\', y", "b": "z"}'])),
        (f"{CALL}(a='x')]')]{END}", Answer("", "", ["set"], ['{"a": "x\')]"}'])),
        (f"{CALL}(a='x')]{END} or')]{END}", Answer("", "", ["set"], [f'{{"a": "x\')]{END} or"}}'])),
        (f"{CALL}(a='x'{END}, y')]{END}", Answer("", "", ["set"], [f'{{"a": "x\'{END}, y"}}'])),
        (f"{CALL}(a='x')]{END} b", Answer("b", "", ["set"], ['{"a": "x"}'])),
        # Without the mark of its end a call ends where its brackets close, and no later quote ends the text.
        (f"{CALL}(a='x')] It's 'so'.", Answer("It's 'so'.", "", ["set"], ['{"a": "x"}'])),
        (f"{CALL}(a=1, b=['x', {{'k': 'y'}}])]\nI did.",
         Answer("I did.", "", ["set"], ['{"a": 1, "b": ["x", {"k": "y"}]}'])),
        (f"{CALL}(a='x')] I\\', so')] I did.", Answer("I did.", "", ["set"], ['{"a": "x\')] I\', so"}'])),
        (f"{CALL}(a='x')] I, b='y')] I did.", Answer("I did.", "", ["set"], ['{"a": "x\')] I, b=\'y"}'])),
        (f"{CALL}(a='x') I did.", Answer("", "", ["set"], ['{"a": "x\') I did.'])),
        (f"{CALL}(a=1, a=2)]{END}", Answer("", "", ["set"], ['{"a": 1a=2)]'])),
        (f"{START}set(a=1){END}", Answer("", "", ["set"], ['{"a": 1}'])),
        (f"{CALL}(a=1), now()]{END} b", Answer("b", "", ["set", "now"], ['{"a": 1}', "{}"])),
        (f"{CALL}(a=1), nobody()]{END}", Answer(f", nobody()]{END}", "", ["set"], ['{"a": 1}'])),
        (f"{CALL}(5)]{END} b", Answer("b", "", ["set"], ["{5)]"])),
        (f"{CALL}{{}}]{END}", Answer(f"{CALL}{{}}]{END}")),
        (f"{START}[nobody()]{END}", Answer(f"{START}[nobody()]{END}")),
    ],
)  # fmt: skip
def test_malformed_and_cut_short(text: str, expected: Answer) -> None:
    assert parse_however_cut(parser, text) == expected


def test_a_mark_that_is_a_token_ends_the_text_of_a_call_that_lacks_its_own() -> None:
    text = f"{CALL}(a='x')] Then {START}[set(b='y')]{END}"
    marks = [0, text.index(START, 1), text.index(END)]
    stream = parser(tokens=frozenset({START, END}))
    answer = assemble([*stream.feed(text, marks), *stream.finish()])
    assert answer == Answer("Then", "", ["set", "set"], ['{"a": "x"}', '{"b": "y"}'])


def test_texts_come_as_they_are_written() -> None:
    stream = parser()
    stream.feed(f"{CALL}(te")
    assert stream.feed("xt='say \"hi") == [ToolCallDelta(0, None, None, '"text": "say \\"hi')]
    assert stream.feed("\n") == [ToolCallDelta(0, None, None, "\\n")]
    assert stream.feed("'") == []
    assert stream.feed("s') ") == [ToolCallDelta(0, None, None, "'s")], "the text may go on behind a bracket"
    assert stream.feed(f"]{END}") == []
    assert stream.finish() == [ToolCallDelta(0, None, None, '"}')]


@pytest.mark.parametrize(
    "sign", ["{{ '<|tool_call_start|>[' }}", "{{ '<|tool_list_start|>[' }}", "{{ 'List of tools: [' }}"]
)
def test_templates_that_ask_for_it(sign: str) -> None:
    template = (
        sign
        + "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    assert find_format(template).style is PYTHONIC


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
                    "text": {"type": ["string", "null"], "maxLength": 12},
                },
                "required": ["kind", "count"],
                "additionalProperties": False,
                "$defs": {"kind": {"enum": ["x", "y z", 5]}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "free", "parameters": {"type": "object", "additionalProperties": True}}},
]  # fmt: skip


@pytest.fixture(params=[False, True], ids=["marks are text", "marks are control tokens"])
def byte_vocabulary(request: pytest.FixtureRequest) -> ByteVocabulary:
    return ByteVocabulary(sorted(mark for mark in MARKS if "think" not in mark) if request.param else [])


def test_what_a_grammar_allows(byte_vocabulary: ByteVocabulary) -> None:
    form = AnswerFormat(PYTHONIC, THINK)
    good, other = ("set", {"kind": "y z", "count": 7}), ("now", {})
    forced = call_grammar(form, STRICT, required=True, mark_ids=byte_vocabulary.ids)
    for calls, allowed in (
        ([good], True),
        ([("set", {"kind": 5, "count": 7, "text": 'a "b"\n'})], True),
        ([("set", {"kind": "x", "count": 1, "text": None})], True),
        ([good, other, good], True),
        ([("set", {"kind": "z", "count": 7})], False),
        ([("set", {"kind": "x"})], False),
        ([("set", {"kind": "x", "count": 100})], False),
        ([("set", {"kind": "x", "count": 1, "text": "more than a dozen"})], False),
        ([("set", {"kind": "x", "count": 1, "other": 1})], False),
        ([("now", {"a": 1})], False),
        ([("free", {"a": [1.5, {"b": None, "c": "d"}], "b": 1})], True),
        ([("nobody", {})], False),
    ):
        assert allows(forced, byte_vocabulary, written(calls, json.dumps)) is allowed, calls
    assert not allows(forced, byte_vocabulary, "Hello")
    named = call_grammar(form, STRICT, name="now", parallel=False, mark_ids=byte_vocabulary.ids)
    assert allows(named, byte_vocabulary, written([other], json.dumps))
    assert not allows(named, byte_vocabulary, written([good], json.dumps))
    free = call_grammar(form, STRICT, mark_ids=byte_vocabulary.ids)
    for text, allowed in (
        ("Hello [there], (a)\n", True),
        ("Look:\n" + written([good], json.dumps), True),
        ("Look:\n" + written([("set", {"kind": "z", "count": 7})], json.dumps), False),
    ):
        assert allows(free, byte_vocabulary, text) is allowed, text


LIKE_LFM2 = """{% if tools %}List of tools: [{% for tool in tools %}{{ tool | tojson }}{% endfor %}]{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor -%}"""


def test_calls_that_a_template_leaves_out_are_written_into_their_message() -> None:
    """They come back from the parser; a result stays the tool's message."""
    arguments = {"a": 'it\'s "so"\n', "b": [True, None, {"c": "d"}], "e": 1.5, "f": {"g": False}}
    calls = [
        {"id": str(place), "type": "function", "function": {"name": name, "arguments": json.dumps(made)}}
        for place, (name, made) in enumerate((("set", arguments), ("now", {})))
    ]
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "0", "content": "sunny"},
    ]
    tools = [{"type": "function", "function": {"name": name}} for name in TOOLS]
    text = ChatTemplate(tokenizer(LIKE_LFM2)).render(messages, tools, add_generation_prompt=False)
    assert text.endswith("<|im_start|>tool\nsunny<|im_end|>\n")
    answer = text.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0]
    expected = Answer("I look.", "", ["set", "now"], [json.dumps(arguments), "{}"])
    assert parse(parser(), list(answer)) == expected
