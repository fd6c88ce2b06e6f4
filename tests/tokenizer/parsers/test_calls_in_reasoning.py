"""Models forget to end their reasoning before a call: the call counts, and the reasoning before it stays reasoning."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from realizar.tokenizer.marks import REASONING_MARKS
from realizar.tokenizer.parsers.choose import AnswerFormat, choose_parser
from realizar.tokenizer.parsers.parser import AnswerParser
from realizar.tokenizer.parsers.styles import HERMES
from tokenizer.parsers.parsed_answers import Answer, parse_however_cut
from tokenizer.parsers.test_calls_as_written import TOOLS, WRITERS

THINK = REASONING_MARKS[0]
PLACES = random.Random(7).sample(range(200), 9)
GIVEN: list[dict[str, Any]] = [{"x": "y\nz"}, {"x": "", "n": 5}]
MARKED = sorted(name for name, (style, _) in WRITERS.items() if style is not None and style.marks and name != "llama3")
CALL = '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("behind", ["", "\n", "\n</think>\n\n", "\n</think>"])
@pytest.mark.parametrize("writer", MARKED)
def test_the_call_counts(writer: str, behind: str) -> None:
    style, write = WRITERS[writer]
    text = f"I read the file.\n{write([('get', GIVEN[0]), ('put', GIVEN[1])])}{behind}"
    answer = parse_however_cut(lambda: AnswerParser(THINK, style, TOOLS, reasoning_open=True), text, PLACES)
    assert (answer.reasoning, answer.content, answer.names) == ("I read the file.", "", ["get", "put"])
    assert [json.loads(arguments) for arguments in answer.arguments] == GIVEN


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"a\n{CALL}\nb\n</think>\n\nc", Answer("c", "a\nb", ["get"], ["{}"])),
        (f"{CALL}\n{CALL}", Answer("", "", ["get", "get"], ["{}", "{}"])),
        (f"a</think>\n{CALL}\nb", Answer("b", "a", ["get"], ["{}"])),
        # What is no call stays reasoning.
        ("I may use <tool_call>.\n</think>b", Answer("b", "I may use <tool_call>.")),
        ('a <tool_call>{"name": "nobody"}</tool_call> b', Answer("", 'a <tool_call>{"name": "nobody"}</tool_call> b')),
        ('a {"name": "get", "arguments": {}} b', Answer("", 'a {"name": "get", "arguments": {}} b')),
        ("a <tool_call>", Answer("", "a <tool_call>")),
    ],
)
def test_reasoning_around_calls(text: str, expected: Answer) -> None:
    found = parse_however_cut(lambda: AnswerParser(THINK, HERMES, TOOLS, reasoning_open=True), text, PLACES)
    assert found == expected


def test_reasoning_goes_on_behind_a_call() -> None:
    stream = AnswerParser(THINK, HERMES, TOOLS, reasoning_open=True)
    inside = []
    for part in ("a", CALL[:30], CALL[30:], " b", "</think>", "c"):
        stream.feed(part)
        inside.append(stream.in_reasoning)
    assert inside == [True, False, False, True, False, False]


def test_a_grammar_allows_no_calls_in_reasoning() -> None:
    """It lets any text through there, so a call would be unchecked."""
    form = AnswerFormat(HERMES, THINK)
    tools = [{"function": {"name": "get"}}]
    text = f"a\n{CALL}\n</think>\n{CALL}"
    answer = parse_however_cut(lambda: choose_parser(form, tools, prompt_end="<think>", constrained=True), text, PLACES)
    assert answer == Answer("", f"a\n{CALL}", ["get"], ["{}"])
