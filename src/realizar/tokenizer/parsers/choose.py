"""Choice of the parser for a model's answers, by its chat template."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from realizar.tokenizer.marks import (
    DEEPSEEK_CALL,
    DEEPSEEK_NAME_END,
    GEMMA_CALL,
    GLM_KEY,
    GLM_KEY_END,
    GLM_VALUE,
    GRANITE_CALLS,
    HARMONY_CHANNEL,
    HARMONY_MESSAGE,
    HERMES_CALL,
    LFM2_CALLS,
    LFM2_TOOLS,
    LLAMA_CALL,
    MINIMAX_CALLS,
    MISTRAL_ARGUMENTS,
    MISTRAL_CALLS,
    REASONING_MARKS,
    SEED_CALL,
    ReasoningMarks,
)
from realizar.tokenizer.parsers.gemma import GEMMA
from realizar.tokenizer.parsers.harmony import HARMONY, HarmonyParser
from realizar.tokenizer.parsers.incremental import OutputParser
from realizar.tokenizer.parsers.parser import AnswerParser
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
from realizar.tokenizer.templates.chat_messages import TemplateFailedError, Tools
from realizar.tokenizer.templates.chat_template import CompiledTemplate

# A template may contain several of these texts; the more specific ones come first.
_STYLE_TEXTS = (
    (f"function{DEEPSEEK_NAME_END}", DEEPSEEK_FENCED),
    (DEEPSEEK_CALL, DEEPSEEK),
    (MISTRAL_ARGUMENTS, MISTRAL),
    (MISTRAL_CALLS, MISTRAL_LIST),
    (GRANITE_CALLS, GRANITE),
    (MINIMAX_CALLS, MINIMAX),
    (SEED_CALL, SEED_OSS),
    (f"{GLM_KEY_END}{GLM_VALUE}", GLM_DENSE),
    (GLM_KEY, GLM),
    (GEMMA_CALL, GEMMA),
    (LFM2_CALLS, PYTHONIC),
    *((text, PYTHONIC) for text in LFM2_TOOLS),
    ("<parameter=", QWEN3_CODER),
    (HERMES_CALL, HERMES),
    (LLAMA_CALL, LLAMA),
    ('"parameters": dictionary', LLAMA),
    ('\\"parameters\\": dictionary', LLAMA),
    ("Environment: ipython", LLAMA),
)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format of a model's answers.

    Attributes:
        style: the style of its calls.
        reasoning: the marks of its reasoning; None if it has none, or has channels.
        in_channels: answers are messages in channels.
        in_response: their content stands between `<response>` and `</response>`.
    """

    style: ToolStyle
    reasoning: ReasoningMarks | None
    in_channels: bool = False
    in_response: bool = False


@functools.lru_cache(maxsize=64)
def find_format(template: str | None) -> AnswerFormat:
    """By the source of a template; ChatTemplateError where it exceeds its bounds of time or memory."""
    if template is None:
        return AnswerFormat(JSON, None)
    try:
        return format_of(CompiledTemplate(template))
    except TemplateFailedError:  # it is malformed, and nothing will be rendered
        return _format(template, takes_tools=False, in_response=False)


def format_of(template: CompiledTemplate) -> AnswerFormat:
    """Find the format of the answers to a template's prompts; raises as `find_format` does.

    If a template shows no tools, or its style is not known, calls are JSON objects. If such a template can write
    earlier calls, the model may use that style too.
    """
    source = template.source
    try:
        takes_tools, in_response = template.takes_tools, template.in_response
    except TemplateFailedError:  # it fails on such conversations, and may work for others
        takes_tools = in_response = False
    return _format(source, takes_tools=takes_tools, in_response=in_response)


def _format(source: str, *, takes_tools: bool, in_response: bool) -> AnswerFormat:
    if HARMONY_CHANNEL in source and HARMONY_MESSAGE in source:
        return AnswerFormat(HARMONY, None, in_channels=True)
    reasoning = next((marks for marks in REASONING_MARKS if marks.start in source or marks.end in source), None)
    style = next((known for text, known in _STYLE_TEXTS if text in source), JSON)
    if not takes_tools:
        style = json_or(style)
    return AnswerFormat(style, reasoning, in_response=in_response)


def opens_reasoning(marks: ReasoningMarks | None, prompt_end: str) -> bool:
    """True if a prompt ends inside reasoning: its last words, with control tokens spelled out, end with the mark."""
    return marks is not None and prompt_end.rstrip().endswith(marks.start)


def closes_reasoning(marks: ReasoningMarks, prompt_end: str) -> bool:
    """True if a prompt ends with the end of reasoning: the answer has none."""
    return prompt_end.rstrip().endswith(marks.end)


def choose_parser(
    form: AnswerFormat,
    tools: Tools | None,
    *,
    parallel: bool = True,
    prompt_end: str = "",
    constrained: bool = False,
    tokens: frozenset[str] = frozenset(),
    calls_first: bool = False,
) -> OutputParser:
    """Make the parser of one answer.

    Args:
        form: the answer format of the chat template that rendered the prompt, from `find_format`.
        tools: function descriptions in the format of OpenAI's API; None or empty if no call is wanted.
        prompt_end: the last words of the prompt, with control tokens spelled out; a dozen tokens are enough.
        constrained: the answer follows a grammar, which has no calls within reasoning.
        tokens: marks that the vocabulary has as tokens, of `Tokenizer.answer_marks`; spelled otherwise, they are text.
        calls_first: calls stand at the answer's beginning alone, in place of a text that a grammar describes.
    """
    known = {tool_name(tool): tool_parameters(tool) for tool in tools or ()}
    if form.in_channels:
        return HarmonyParser(known, prompt_end, parallel=parallel, tokens=tokens)
    return AnswerParser(
        form.reasoning,
        _enforced(form.style, tools, calls_first) if tools else None,
        known,
        reasoning_open=opens_reasoning(form.reasoning, prompt_end),
        parallel=parallel,
        in_response=form.in_response,
        calls_in_reasoning=not constrained,
        tokens=tokens,
    )


def is_strict(tool: Mapping[str, Any]) -> bool:
    """True if the calls of a tool follow its schema exactly."""
    return bool(tool.get("function", tool).get("strict"))


def _enforced(style: ToolStyle, tools: Tools, calls_first: bool) -> ToolStyle:
    """The style with those marks alone that a grammar of free text enforces, if a tool is strict.

    Behind another mark of a call the grammar lets any text through, so it is content. Where calls come first, a mark
    counts at the beginning alone: in JSON it is a part of some text.
    """
    if calls_first:
        first = (*style.marks, *style.line_marks, *style.first_marks)
        return replace(style, marks=(), line_marks=(), first_marks=first)
    if not any(map(is_strict, tools)):
        return style
    marks = () if style.first_marks or style.line_marks else style.marks[:1]
    return replace(style, marks=marks)


def tool_name(tool: Mapping[str, Any]) -> str:
    name = tool.get("function", tool).get("name", "")
    return name if isinstance(name, str) else ""


def tool_parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = tool.get("function", tool).get("parameters")
    return parameters if isinstance(parameters, Mapping) else {}
