"""Grammars that force tool calls: what they allow, and that whatever they allow parses as calls by the schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from realizar.tokenizer.marks import MARKS, REASONING_MARKS
from realizar.tokenizer.parsers.choose import AnswerFormat, tool_name
from realizar.tokenizer.parsers.grammar import call_grammar
from realizar.tokenizer.parsers.parser import AnswerParser
from realizar.tokenizer.parsers.styles import (
    DEEPSEEK,
    DEEPSEEK_FENCED,
    GRANITE,
    HERMES,
    JSON,
    LLAMA,
    MISTRAL,
    MISTRAL_LIST,
    ToolStyle,
)
from tokenizer.parsers.grammar_walk import ByteVocabulary, allows, matcher, walk
from tokenizer.parsers.parsed_answers import parse

STYLES = [HERMES, GRANITE, LLAMA, MISTRAL, MISTRAL_LIST, DEEPSEEK, DEEPSEEK_FENCED, JSON]
THINK = REASONING_MARKS[0]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/kind"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
                "required": ["a", "n"],
                "additionalProperties": False,
                "$defs": {"kind": {"enum": ["x", "y z"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def written(style: ToolStyle, *calls: tuple[str, str]) -> str:
    """Calls as the style's grammar writes them."""
    form = style.form
    each = [form.before_name + name + form.before_arguments + arguments + form.after for name, arguments in calls]
    return each[0] if form.alone and len(each) == 1 else form.first + form.between.join(each) + form.last


@pytest.fixture(params=[False, True], ids=["marks are text", "marks are control tokens"])
def vocabulary(request: pytest.FixtureRequest) -> ByteVocabulary:
    return ByteVocabulary(sorted(MARKS) if request.param else [])


@pytest.mark.parametrize("style", STYLES, ids=lambda style: f"{style.name}{len(style.form.after)}")
@pytest.mark.parametrize("reasoning", [None, THINK], ids=["", "reasoning"])
def test_what_is_allowed(style: ToolStyle, reasoning: Any, vocabulary: ByteVocabulary) -> None:
    form = AnswerFormat(style, reasoning)
    good, other, bad = ("get", '{"a": "y z", "n": 7}'), ("now", "{}"), ("get", '{"a": "z", "n": 7}')
    forced = call_grammar(form, TOOLS, required=True, mark_ids=vocabulary.ids)
    for text, allowed in (
        (written(style, good), True),
        (written(style, good, other), True),
        (written(style, bad), False),
        (written(style, ("nobody", "{}")), False),
        ("Hello", False),
        ("", False),
        ("<think>hm {\n </think>\n\n" + written(style, good), reasoning is not None),
        ("<think>hm {\n </think>\n\n" + written(style, bad), False),
    ):
        assert allows(forced, vocabulary, text) is allowed, text
    one = call_grammar(form, TOOLS, required=True, parallel=False, mark_ids=vocabulary.ids)
    assert allows(one, vocabulary, written(style, good))
    assert not allows(one, vocabulary, written(style, good, other))
    named = call_grammar(form, TOOLS, name="now", mark_ids=vocabulary.ids)
    assert allows(named, vocabulary, written(style, other))
    assert not allows(named, vocabulary, written(style, good))


@pytest.mark.parametrize("style", STYLES, ids=lambda style: f"{style.name}{len(style.form.after)}")
@pytest.mark.parametrize("reasoning", [None, THINK], ids=["", "reasoning"])
def test_strict_leaves_text_free(style: ToolStyle, reasoning: Any, vocabulary: ByteVocabulary) -> None:
    form = AnswerFormat(style, reasoning)
    good, bad = ("get", '{"a": "x", "n": 7}'), ("get", '{"a": "x", "n": -7}')
    lax = call_grammar(form, TOOLS[1:], mark_ids=vocabulary.ids)
    assert lax is None, "no tool is strict: the model writes what it likes"
    strict = call_grammar(form, TOOLS, mark_ids=vocabulary.ids)
    allowed = ["Hello <there>, {a}\nhow\n\nare you?", "", written(style, good), written(style, good, ("now", "{}"))]
    refused = [written(style, bad)]
    if style.marks and not style.first_marks:
        allowed.append("Look:\n" + written(style, good))
        refused.append("Look:\n" + written(style, bad))
    if reasoning is not None:
        allowed.append("<think>\nhm\n</think>\n\n" + written(style, good))
        refused.append("<think>\nhm\n</think>\n\n" + written(style, bad))
    assert [text for text in allowed if not allows(strict, vocabulary, text)] == []
    assert [text for text in refused if allows(strict, vocabulary, text)] == []
    opened = call_grammar(form, TOOLS, mark_ids=vocabulary.ids, prompt_end="<think>\n")
    assert allows(opened, vocabulary, "hm</think>\n\nHi" if reasoning is not None else "Hi")


@pytest.mark.parametrize("style", STYLES, ids=lambda style: f"{style.name}{len(style.form.after)}")
def test_whatever_is_allowed_parses(style: ToolStyle, vocabulary: ByteVocabulary) -> None:
    """Walks at random through what a forced grammar allows."""
    rng = random.Random(5)
    tools: dict[str, dict[str, Any]] = {tool_name(tool): {} for tool in TOOLS}
    grammar = call_grammar(AnswerFormat(style, None), TOOLS, required=True, mark_ids=vocabulary.ids)
    for _ in range(12):
        text = vocabulary.decode(walk(matcher(grammar, vocabulary), vocabulary, rng))
        answer = parse(AnswerParser(None, style, tools), list(text))
        assert answer.content == "", text
        assert answer.names
        for name, arguments in zip(answer.names, answer.arguments, strict=True):
            value = json.loads(arguments)
            if name == "get":
                assert set(value) == {"a", "n"}
                assert value["a"] in ("x", "y z")
                assert 0 <= value["n"] <= 99


def test_schema_that_cannot_be_enforced() -> None:
    """It is passed over for a tool that is not strict, and not for one that is."""
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "array", "uniqueItems": True, "contains": {"type": "null"}}},
    }
    for strict in (False, True):
        tool = {"type": "function", "function": {"name": "f", "strict": strict, "parameters": parameters}}
        grammar = call_grammar(AnswerFormat(JSON, None), [tool], required=True)
        assert grammar is not None
        tokenizer = LLTokenizer(TokenizerWrapper(ByteVocabulary([])), n_vocab=257)
        assert LLMatcher(tokenizer, grammar.value, log_level=0).is_error() is strict
