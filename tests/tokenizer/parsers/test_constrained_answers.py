"""Answers that a grammar constrains beside calls and behind reasoning: what is allowed, and that it parses as such."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from realizar.sampling_params import StructuredOutput
from realizar.tokenizer.marks import HARMONY_MARKS, MARKS, REASONING_MARKS
from realizar.tokenizer.parsers.choose import AnswerFormat, choose_parser
from realizar.tokenizer.parsers.gemma import GEMMA
from realizar.tokenizer.parsers.grammar import call_grammar
from realizar.tokenizer.parsers.harmony import HARMONY
from realizar.tokenizer.parsers.pythonic import PYTHONIC
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
    json_or,
)
from realizar.tokenizer.parsers.tagged_styles import GLM, GLM_DENSE, MINIMAX, QWEN3_CODER, SEED_OSS
from tokenizer.parsers.grammar_walk import ByteVocabulary, allows, matcher, walk
from tokenizer.parsers.parsed_answers import parse
from wider import diagonal

STYLES = {
    "hermes": HERMES,
    "granite": GRANITE,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mistral list": MISTRAL_LIST,
    "deepseek": DEEPSEEK,
    "deepseek fenced": DEEPSEEK_FENCED,
    "json": JSON,
    "json or hermes": json_or(HERMES),
    "gemma": GEMMA,
    "pythonic": PYTHONIC,
    "glm": GLM,
    "glm dense": GLM_DENSE,
    "minimax": MINIMAX,
    "qwen3 coder": QWEN3_CODER,
    "seed": SEED_OSS,
    "harmony": HARMONY,
}
THINK = REASONING_MARKS[0]
# A property named as a part of a call is: an answer may begin as a call does.
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 90}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
FORM = StructuredOutput("json_schema", json.dumps(SCHEMA))
ANSWER = '{"name": "get", "n": 7}'
WRONG = ('{"name": "get", "n": 70}', '{"n": 7}', "Hello", "", ANSWER + ANSWER)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("get", "get_more")
]


def form_of(name: str, reasoning: bool = False) -> AnswerFormat:
    if name == "harmony":
        return AnswerFormat(HARMONY, None, in_channels=True)
    return AnswerFormat(STYLES[name], THINK if reasoning else None)


@pytest.fixture(params=[False, True], ids=["marks are text", "marks are control tokens"])
def vocabulary(request: pytest.FixtureRequest) -> ByteVocabulary:
    return ByteVocabulary(sorted({*HARMONY_MARKS, *(MARKS if request.param else ())}))


def final(form: AnswerFormat, text: str) -> str:
    """An answer without a call, as the format writes it."""
    return f"<|channel|>final<|message|>{text}" if form.in_channels else text


def call_text(vocabulary: ByteVocabulary, form: AnswerFormat, name: str = "get") -> str:
    """A call as a forced grammar writes it."""
    grammar = call_grammar(form, TOOLS, name=name, parallel=False, mark_ids=vocabulary.ids, prompt_end="</think>")
    found = matcher(grammar, vocabulary)
    if form.in_channels:
        start = vocabulary.encode("<|channel|>commentary to")
        assert all(map(found.consume_token, start))
        return vocabulary.decode([*start, *walk(found, vocabulary, random.Random(1))])
    return vocabulary.decode(walk(found, vocabulary, random.Random(1)))


@pytest.mark.parametrize("name", STYLES)
def test_a_call_or_an_answer_by_the_schema(name: str, vocabulary: ByteVocabulary) -> None:
    form = form_of(name)
    grammar = call_grammar(form, TOOLS, structured=FORM, mark_ids=vocabulary.ids)
    for tool in ("get", "get_more"):
        called = call_text(vocabulary, form, tool)
        assert allows(grammar, vocabulary, called), called
        parser = choose_parser(form, TOOLS, constrained=True, calls_first=True, prompt_end="<|start|>assistant")
        answer = parse(parser, list(called))
        assert (answer.content, answer.names) == ("", [tool])
        assert list(json.loads(answer.arguments[0])) == ["a"]
    assert allows(grammar, vocabulary, final(form, ANSWER))
    for text in WRONG:
        assert not allows(grammar, vocabulary, final(form, text)), text
    assert not allows(grammar, vocabulary, final(form, ANSWER) + call_text(vocabulary, form))


@pytest.mark.parametrize("name", STYLES)
def test_prose_before_a_call_has_a_place_of_its_own(name: str, vocabulary: ByteVocabulary) -> None:
    """Beside a schema an answer begins with a call or with JSON: prose would leave no end but a call."""
    form = form_of(name, reasoning=True)
    grammar = call_grammar(form, TOOLS, structured=FORM, mark_ids=vocabulary.ids)
    channel, end = "<|channel|>commentary<|message|>", "<|end|><|start|>assistant"
    before = f"{channel}I look it up.{end}" if form.in_channels else "<think>\nI look it up.\n</think>\n\n"
    for text in (call_text(vocabulary, form), final(form, ANSWER)):
        assert allows(grammar, vocabulary, before + text)
        assert not allows(grammar, vocabulary, f"I look it up.{text}")


@pytest.mark.parametrize("name", [each for each in STYLES if each != "harmony"])
def test_whatever_is_allowed_is_a_call_or_follows_the_schema(name: str, vocabulary: ByteVocabulary) -> None:
    """Each mark stands within a text of the answer, where it is no call."""
    form, rng = form_of(name), random.Random(7)
    grammar = call_grammar(form, TOOLS, structured=FORM, mark_ids=vocabulary.ids)
    for _ in range(4):
        text = vocabulary.decode(walk(matcher(grammar, vocabulary), vocabulary, rng))
        answer = parse(choose_parser(form, TOOLS, constrained=True, calls_first=True), list(text))
        if answer.names:
            assert answer.content == ""
            assert all(set(json.loads(each)) == {"a"} for each in answer.arguments)
        else:
            assert set(json.loads(answer.content)) == {"name", "n"}
    called = call_text(ByteVocabulary([]), form).replace("\n", " ")
    texts = [called, *STYLES[name].marks, "\n" + called]
    for text in [json.dumps({"name": each, "n": 1}, ensure_ascii=False) for each in texts]:
        for pieces in (list(text), [text]):
            assert parse(choose_parser(form, TOOLS, constrained=True, calls_first=True), pieces).content == text
    array = json.dumps([called, {"x": called}], ensure_ascii=False)
    assert parse(choose_parser(form, TOOLS, constrained=True, calls_first=True), list(array)).content == array


@pytest.mark.parametrize("name", STYLES)
def test_several_calls_if_they_are_allowed(name: str, vocabulary: ByteVocabulary) -> None:
    form = form_of(name)
    style: ToolStyle = form.style
    one, two = call_text(vocabulary, form), call_text(vocabulary, form, "get_more")
    inner = [each.removeprefix(style.form.first).removesuffix(style.form.last) for each in (one, two)]
    if style.form.alone:
        inner = [one, two]
    several = style.form.first + style.form.between.join(inner) + style.form.last
    grammar = call_grammar(form, TOOLS, structured=FORM, mark_ids=vocabulary.ids)
    assert allows(grammar, vocabulary, several) is (not form.in_channels), several
    single = call_grammar(form, TOOLS, structured=FORM, mark_ids=vocabulary.ids, parallel=False)
    assert allows(single, vocabulary, one)
    assert not allows(single, vocabulary, several)
    if not form.in_channels:
        assert parse(choose_parser(form, TOOLS, constrained=True, calls_first=True), list(several)).names == [
            "get",
            "get_more",
        ]


@pytest.mark.parametrize("name", STYLES)
def test_a_forced_call_leaves_the_schema_no_part(name: str, vocabulary: ByteVocabulary) -> None:
    form = form_of(name)
    for forced in ({"required": True}, {"name": "get"}):
        grammar = call_grammar(form, TOOLS, structured=FORM, mark_ids=vocabulary.ids, **forced)  # type: ignore[arg-type]
        assert allows(grammar, vocabulary, call_text(vocabulary, form))
        assert not allows(grammar, vocabulary, final(form, ANSWER))


@pytest.mark.parametrize("tools", [[], TOOLS, [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]])
@pytest.mark.parametrize("name", ["hermes", "json", "harmony"])
def test_reasoning_comes_first(name: str, tools: list[dict[str, Any]], vocabulary: ByteVocabulary) -> None:
    form = form_of(name, reasoning=True)
    if form.in_channels:
        thought = '<|channel|>analysis<|message|>hm {"a\n<|end|><|start|>assistant'
        prompts = [("<|start|>assistant", thought, True), ("<|start|>assistant", "", True)]
    else:
        prompts = [
            ("assistant\n", '<think>\nhm {"a\n</think>\n\n', True),
            ("assistant\n", "", True),
            ("<think>\n", 'hm {"a\n</think>\n\n', True),
            ("<think>\n", "</think>", True),
            ("<think>\n", "", False),
            ("<think>\n\n</think>\n\n", "", True),
            ("<think>\n\n</think>\n\n", '<think>\nhm {"a\n</think>\n\n', False),
        ]
    for prompt_end, thought, allowed in prompts:
        grammar = call_grammar(form, tools, structured=FORM, mark_ids=vocabulary.ids, prompt_end=prompt_end)
        text = thought + final(form, ANSWER)
        assert allows(grammar, vocabulary, text) is allowed, (prompt_end, thought)
        assert not allows(grammar, vocabulary, thought + final(form, WRONG[0]))
        if allowed:
            parser = choose_parser(form, tools, constrained=True, calls_first=True, prompt_end=prompt_end)
            answer = parse(parser, list(text))
            assert answer.content == ANSWER
            assert answer.reasoning.strip() == ('hm {"a' if "hm" in thought else "")
        if tools:
            assert allows(grammar, vocabulary, thought + call_text(vocabulary, form)) is allowed


@pytest.mark.parametrize(
    ("structured", "good", "bad"),
    [
        (StructuredOutput("json_object"), '{"b": [1]}', "[]"),
        (StructuredOutput("regex", r"[a-z]+\d"), "ab7", "ab٣"),
        (StructuredOutput("choice", '["yes", "no/\\"n"]'), 'no/"n', "y"),
        (
            StructuredOutput("lark", 'start: answer " " calls\nanswer: "a"\ncalls: %json {"type": "null"}'),
            "a null",
            "a 1",
        ),
    ],
    ids=lambda each: each.kind if isinstance(each, StructuredOutput) else "",
)
def test_every_kind_of_constraint(
    structured: StructuredOutput, good: str, bad: str, vocabulary: ByteVocabulary
) -> None:
    form = form_of("hermes", reasoning=True)
    for tools in ([], TOOLS):
        grammar = call_grammar(form, tools, structured=structured, mark_ids=vocabulary.ids, prompt_end="<think>\n")
        assert allows(grammar, vocabulary, "hm</think>\n\n" + good)
        assert not allows(grammar, vocabulary, "hm</think>\n\n" + bad)
        called = "hm</think>\n\n" + call_text(vocabulary, form)
        assert allows(grammar, vocabulary, called) is bool(tools)


def test_nothing_but_the_answer_keeps_its_own_grammar() -> None:
    """Rows of an expression share masks, and those of a grammar around one do not."""
    plain = AnswerFormat(HERMES, None)
    assert call_grammar(plain, [], structured=FORM) is FORM
    assert call_grammar(replace(plain, reasoning=THINK), [], structured=FORM, prompt_end="</think>\n\n") is FORM


@pytest.mark.parametrize(
    ("name", "more"), diagonal(STYLES, [{}, {"parameters": None}, {"parameters": {}}, {"strict": True}])
)
def test_a_tool_without_parameters_gets_no_arguments(
    name: str, more: dict[str, Any], vocabulary: ByteVocabulary
) -> None:
    form = form_of(name)
    tools = [{"type": "function", "function": {"name": "now", **more}}]
    for structured in (None, FORM):
        forced = call_grammar(form, tools, structured=structured, name="now", mark_ids=vocabulary.ids, parallel=False)
        for seed in range(3):
            found = matcher(forced, vocabulary)
            start = vocabulary.encode("<|channel|>commentary to") if form.in_channels else []
            assert all(map(found.consume_token, start))
            text = vocabulary.decode([*start, *walk(found, vocabulary, random.Random(seed))])
            parser = choose_parser(form, tools, constrained=True, prompt_end="<|start|>assistant")
            answer = parse(parser, list(text))
            assert (answer.names, answer.arguments) == (["now"], ["{}"])
