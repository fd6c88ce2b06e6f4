"""Answers taken apart: every style, every way of cutting, nothing lost, nothing twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realizar.tokenizer.marks import REASONING_MARKS
from realizar.tokenizer.parsers.base import ToolCallDelta
from realizar.tokenizer.parsers.parser import AnswerParser
from realizar.tokenizer.parsers.styles import DEEPSEEK, GRANITE, HERMES, JSON, LLAMA, MISTRAL, ToolStyle
from tokenizer.parsers.parsed_answers import Answer, cut, parse, parse_however_cut

THINK = REASONING_MARKS[0]
NAMES = ("get_weather", "f", "send")
TOOLS: dict[str, dict[str, Any]] = {name: {} for name in NAMES}
Call = tuple[str, dict[str, Any]]


def _object(call: Call, key: str = "arguments") -> str:
    return json.dumps({"name": call[0], key: call[1]}, ensure_ascii=False)


def _mistral_each(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def _mistral_with_ids(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]abcdefghi[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def _deepseek(calls: list[Call]) -> str:
    each = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"


def _deepseek_fenced(calls: list[Call]) -> str:
    each = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments, indent=1)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


# Each writes calls as models of a style do; True where text may stand before them.
WRITERS: dict[str, tuple[ToolStyle, bool, Callable[[list[Call]], str]]] = {
    "hermes": (HERMES, True, lambda c: "\n".join(f"<tool_call>\n{_object(call)}\n</tool_call>" for call in c)),
    "hermes, a list": (HERMES, True, lambda c: f"<tool_call>[{','.join(map(_object, c))}]</tool_call>"),
    "granite": (GRANITE, True, lambda c: f"<|tool_call|>[{', '.join(map(_object, c))}]"),
    "granite, as phi": (GRANITE, True, lambda c: f"<|tool_call|>[{','.join(map(_object, c))}]<|/tool_call|>"),
    "llama": (LLAMA, False, lambda c: "; ".join(_object(call, "parameters") for call in c)),
    "llama, tag": (LLAMA, True, lambda c: "<|python_tag|>" + ";".join(_object(call, "parameters") for call in c)),
    "mistral, list": (MISTRAL, True, lambda c: f"[TOOL_CALLS] [{', '.join(map(_object, c))}]"),
    "mistral": (MISTRAL, True, _mistral_each),
    "mistral, ids": (MISTRAL, True, _mistral_with_ids),
    "deepseek": (DEEPSEEK, True, _deepseek),
    "deepseek, fenced": (DEEPSEEK, True, _deepseek_fenced),
    "json": (JSON, False, lambda c: f"[{', '.join(map(_object, c))}]"),
    "json, lines": (JSON, True, lambda c: "\n" + "\n".join(map(_object, c))),
    "json, fenced": (JSON, True, lambda c: "\n```json\n" + ",\n".join(map(_object, c)) + "\n```"),
}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**20) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
calls_made = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=5), json_values, max_size=3)),
    min_size=1,
    max_size=3,
)
cuts = st.lists(st.integers(0, 10**6), max_size=12)
# What models write between calls, and what only looks like one.
SHARDS = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<tool_",
        "call>",
        "<|python_tag|>",
        "<|tool_call|>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "[",
    ),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *(
        '{"name": "f", "arguments": {',
        '{"name": "nobody", "arguments": {}}',
        '{"name":',
        '"f"',
        '"arguments"',
        ":",
        ",",
    ),
    *('{"name": "f", "arguments": {"a": 1}}', '{"parameters": {"b": "\\u00e9"}, "name": "send"}', "{", "}", "]", '"'),
    *("```json\n", "```", "\n", " ", ";", "f", "text", "é", "\\", "null", "-1.5e3", "<think>", "</think>", "</", "<"),
)
soups = st.lists(st.sampled_from(SHARDS), max_size=14).map("".join)
styles = st.sampled_from([HERMES, GRANITE, LLAMA, MISTRAL, DEEPSEEK, JSON])


def parser(style: ToolStyle | None, **options: Any) -> AnswerParser:
    reasoning = options.pop("reasoning", None)
    return AnswerParser(reasoning, style, TOOLS, **options)


@pytest.mark.parametrize("writer", WRITERS)
@settings(max_examples=60)
@given(calls=calls_made, places=cuts)
def test_calls_of_every_style(writer: str, calls: list[Call], places: list[int]) -> None:
    style, may_follow_text, write = WRITERS[writer]
    for before in ("", "Let me look.\n")[: 1 + may_follow_text]:
        answer = parse(parser(style), cut(before + write(calls) + "\n", places))
        assert [(n, json.loads(a)) for n, a in zip(answer.names, answer.arguments, strict=True)] == calls
        assert answer.content == before.rstrip()


@given(style=styles, text=soups, places=cuts, reasoning=st.booleans(), is_open=st.booleans(), parallel=st.booleans())
def test_every_way_of_cutting_is_the_same(
    style: ToolStyle, text: str, places: list[int], reasoning: bool, is_open: bool, parallel: bool
) -> None:
    options: dict[str, Any] = {
        "reasoning": THINK if reasoning else None,
        "reasoning_open": reasoning and is_open,
        "parallel": parallel,
    }
    whole = parse_however_cut(lambda: parser(style, **options), text, places)
    _check_nothing_is_doubled(text, whole)
    if not whole.names and not reasoning:
        assert whole.content == text


def _check_nothing_is_doubled(text: str, answer: Answer) -> None:
    """Every part of the answer occurs in the text, in the text's order."""
    for out in (answer.content, answer.reasoning, "".join(answer.arguments).replace("\\n", "\n")):
        position = -1
        for char in out:
            position = text.find(char, position + 1)
            assert position >= 0, out


@given(text=soups, places=cuts)
def test_without_tools_all_is_content(text: str, places: list[int]) -> None:
    answer = parse(AnswerParser(None, None), cut(text, places))
    assert answer == Answer(content=text)


@given(thought=soups, answer=soups, places=cuts, is_open=st.booleans())
def test_reasoning_is_split_off(thought: str, answer: str, places: list[int], is_open: bool) -> None:
    thought = thought.replace("</think>", "").replace("<think>", "")
    if "</think>" in thought or thought.endswith(("<", "</")):
        return
    text = f"{'' if is_open else '<think>'}\n{thought}\n</think>\n\n{answer}"
    found = parse(AnswerParser(THINK, None, reasoning_open=is_open), cut(text, places))
    assert found == Answer(content=answer.lstrip(" \n"), reasoning=thought.strip(" \n"))


def test_reasoning_only_at_the_beginning() -> None:
    assert parse(AnswerParser(THINK, None), ["a <think>b</think>"]) == Answer(content="a <think>b</think>")
    assert parse(AnswerParser(THINK, None, reasoning_open=True), ["cut sh", "ort "]) == Answer(reasoning="cut short ")
    assert parse(AnswerParser(THINK, None, reasoning_open=True), ["<think>", "a</think>b"]) == Answer("b", "a")
    assert parse(AnswerParser(THINK, None), [" \n x"]) == Answer(" \n x")


@given(text=soups.filter(lambda text: "<think>" not in text), places=cuts, with_tools=st.booleans())
def test_content_between_marks(text: str, places: list[int], with_tools: bool) -> None:
    """The marks around content are not part of it, and calls may follow them."""
    answer = f"<think>\nhm\n</think>\n\n<response>\n{text}\n</response>\n"
    call = '\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'

    def fed(answer: str, pieces: list[str]) -> Answer:
        return parse(AnswerParser(THINK, HERMES if with_tools else None, TOOLS, in_response=True), pieces)

    found = fed(answer, cut(answer, places))
    assert found == fed(answer, [answer]) == fed(answer, list(answer))
    if "<tool_call>" not in text:
        assert (found.content, found.reasoning) == (text.strip(" \n") if text.strip(" \n") else found.content, "hm")
        called = fed(answer + call, cut(answer + call, places))
        assert called.names == (["f"] if with_tools else [])
    assert "response>" not in found.content


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hi", Answer("Hi")),
        ("<response>\nHi", Answer("Hi")),
        ("<response>Hi</response>", Answer("Hi")),
        ("Say <response>Hi</response>", Answer("Say <response>Hi</response>")),
        ("<response>a</response>\nb</response>", Answer("a\nb</response>")),
        ("<resp", Answer("<resp")),
    ],
)
def test_content_with_and_without_its_marks(text: str, expected: Answer) -> None:
    for style in (None, HERMES):
        assert parse(AnswerParser(None, style, TOOLS, in_response=True), [text]) == expected
        assert parse(AnswerParser(None, style, TOOLS, in_response=True), list(text)) == expected


def test_arguments_come_as_they_are_written() -> None:
    stream = parser(HERMES)
    assert stream.feed('<tool_call>{"name": "f", "arg') == []
    (opened,) = stream.feed('uments": {"text": "on')
    assert isinstance(opened, ToolCallDelta)
    assert (opened.index, opened.name, opened.arguments) == (0, "f", '{"text": "on')
    assert opened.id
    assert stream.feed("ce upon") == [ToolCallDelta(0, None, None, "ce upon")]
    assert stream.feed('"}}</tool_call>') == [ToolCallDelta(0, None, None, '"}')]
    assert stream.finish() == []


def test_content_is_not_held_back() -> None:
    stream = parser(HERMES)
    assert [d.text for d in stream.feed("one <tool two <tool_c")] == ["one <tool two"]  # type: ignore[union-attr]
    assert [d.text for d in stream.feed("ow>")] == [" <tool_cow>"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("style", "text", "expected"),
    [
        # The arguments break off: what came stays theirs, up to the mark.
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call> b',
            Answer("b", "", ["f"], ['{"a": oops}}']),
        ),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', Answer("", "", ["f"], ['{"a": 1'])),
        # A forgotten brace; a mark that never comes; a brace too many.
        (HERMES, '<tool_call>{"name": "f", "arguments": {}</tool_call>', Answer("", "", ["f"], ["{}"])),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}', Answer("", "", ["f"], ["{}"])),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}}', Answer("}", "", ["f"], ["{}"])),
        # Arguments as a string, as null, not at all, before the name, among other keys.
        (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', Answer("", "", ["f"], ['{"a": 1}'])),
        (HERMES, '<tool_call>{"name": "f", "arguments": null}', Answer("", "", ["f"], ["{}"])),
        (HERMES, '<tool_call>{"name": "f"}', Answer("", "", ["f"], ["{}"])),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "x": [], "name": "f"}', Answer("", "", ["f"], ['{"a": 1}'])),
        (HERMES, '<tool_call>{"name": "f", "arguments": "no"}', Answer('<tool_call>{"name": "f", "arguments": "no"}')),
        (HERMES, '<tool_call>{"name": "f", "arguments": 3}', Answer('<tool_call>{"name": "f", "arguments": 3}')),
        (HERMES, '<tool_call>{"arguments": {}}', Answer('<tool_call>{"arguments": {}}')),
        # No tool of this name; a call within what was no call.
        (HERMES, '<tool_call>{"name": "g", "arguments": {}}', Answer('<tool_call>{"name": "g", "arguments": {}}')),
        (HERMES, '<tool_call><tool_call>{"name": "f"}', Answer("<tool_call>", "", ["f"], ["{}"])),
        # Control characters in strings become escapes, also where all arguments are one string.
        (
            HERMES,
            '<tool_call>\n{"name": "f", "arguments": {"a": "one\n\ttwo\x00"}}\n</tool_call>',
            Answer("", "", ["f"], ['{"a": "one\\n\\ttwo\\u0000"}']),
        ),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a\t": "\r\n"}', Answer("", "", ["f"], ['{"a\\t": "\\r\\n"}'])),
        (LLAMA, '{"parameters": {"a": "\n"}, "name": "f"}', Answer("", "", ["f"], ['{"a": "\\n"}'])),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"\n\\"}"}',
            Answer("", "", ["f"], ['{"a": "\\n"}']),
        ),
        # Text between and behind calls keeps its distance.
        (HERMES, 'a <tool_call>{"name": "f"}</tool_call>\n\nb \n', Answer("a\n\nb \n", "", ["f"], ["{}"])),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}}, oops]', Answer(", oops]", "", ["f"], ["{}"])),
        (MISTRAL, "[TOOL_CALLS][]", Answer("[TOOL_CALLS][]")),
        (MISTRAL, "[TOOL_CALLS]f and so on", Answer("[TOOL_CALLS]f and so on")),
        (LLAMA, '{"name": "f", "parameters": {}}; {"na', Answer('; {"na', "", ["f"], ["{}"])),
        (LLAMA, '{"name": "f", "city": 1}', Answer('{"name": "f", "city": 1}')),
        (LLAMA, 'Well: {"name": "f", "parameters": {}}', Answer('Well: {"name": "f", "parameters": {}}')),
        (LLAMA, "<|python_tag|>print(1)", Answer("<|python_tag|>print(1)")),
        (JSON, '```\n{"name": "f"}\n```\nDone.', Answer("Done.", "", ["f"], ["{}"])),
        (JSON, '```python\n{"name"}\n```', Answer('```python\n{"name"}\n```')),
        (DEEPSEEK, "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", Answer("", "", ["f"], ["{}"])),
    ],
)
def test_malformed_and_cut_short(style: ToolStyle, text: str, expected: Answer) -> None:
    assert parse_however_cut(lambda: parser(style), text) == expected


@pytest.mark.parametrize("writer", WRITERS)
def test_one_call_ends_the_answer(writer: str) -> None:
    style, _, write = WRITERS[writer]
    stream = parser(style, parallel=False)
    answer = parse(stream, list(write([("f", {"a": [1]}), ("send", {})])))
    assert answer.names == ["f"]
    assert json.loads(answer.arguments[0]) == {"a": [1]}
    assert stream.ended
    assert stream.feed("more") == []


@given(text=st.text(alphabet='{}[]",:\\ \n\x00tfnu0e-+.1a', max_size=24))
def test_arguments_are_json_by_the_standard_parser(text: str) -> None:
    """A call ends where `json` says that its arguments do, and is one only if they are an object."""
    try:
        value, end = json.JSONDecoder(parse_constant=_refuse).raw_decode(text)
    except ValueError:
        value, end = None, 0
    answer = parse(parser(MISTRAL), [f"[TOOL_CALLS]f[ARGS]{text}"])
    if isinstance(value, dict):
        assert answer.arguments == [text[:end]]
    elif not text.lstrip(" \n").startswith("{"):
        assert answer.names == []


def _refuse(word: str) -> Any:
    raise ValueError(word)


def test_ids() -> None:
    ids = set()
    for style in (HERMES, MISTRAL):
        stream = parser(style)
        deltas = stream.feed(WRITERS[style.name][2]([("f", {}), ("f", {})]) + " x")
        found = [d.id for d in deltas if isinstance(d, ToolCallDelta) and d.id]
        assert len(found) == 2
        ids.update(found)
        assert all(i.isalnum() and len(i) == 9 for i in found) == (style is MISTRAL), "its templates want nine letters"
    assert len(ids) == 4
