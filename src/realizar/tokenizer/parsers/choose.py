"""Which parser a model's answers need, as its chat template tells."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realizar.errors import ChatTemplateError
from realizar.tokenizer.marks import (
    DEEPSEEK_CALL,
    DEEPSEEK_NAME_END,
    GRANITE_CALLS,
    HERMES_CALL,
    LLAMA_CALL,
    MISTRAL_ARGUMENTS,
    MISTRAL_CALLS,
    REASONING_MARKS,
    ReasoningMarks,
)
from realizar.tokenizer.parsers.base import OutputParser
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
    json_or,
)
from realizar.tokenizer.templates.chat_template import template_takes_tools

# A template may hold several of these in texts it shows; the more telling come first.
_TELLING = (
    (f"function{DEEPSEEK_NAME_END}", DEEPSEEK_FENCED),
    (DEEPSEEK_CALL, DEEPSEEK),
    (MISTRAL_ARGUMENTS, MISTRAL),
    (MISTRAL_CALLS, MISTRAL_LIST),
    (GRANITE_CALLS, GRANITE),
    (HERMES_CALL, HERMES),
    (LLAMA_CALL, LLAMA),
    ('"parameters": dictionary', LLAMA),
    ('\\"parameters\\": dictionary', LLAMA),
    ("Environment: ipython", LLAMA),
)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes calls and reasoning; `reasoning` is None where it has none."""

    style: ToolStyle
    reasoning: ReasoningMarks | None


@functools.lru_cache(maxsize=64)
def find_format(template: str | None) -> AnswerFormat:
    """How answers to prompts of a template are written.

    A template that shows no tools, and one whose way of calling is not known, mean JSON objects. Where the former
    knows how to write calls that were made, the model may call in that way too.
    """
    if template is None:
        return AnswerFormat(JSON, None)
    reasoning = next((marks for marks in REASONING_MARKS if marks.start in template or marks.end in template), None)
    try:
        takes_tools = template_takes_tools(template)
    except ChatTemplateError:
        takes_tools = False
    style = next((known for text, known in _TELLING if text in template), JSON)
    if not takes_tools:
        style = json_or(style)
    return AnswerFormat(style, reasoning)


def opens_reasoning(marks: ReasoningMarks | None, prompt_end: str) -> bool:
    """Whether a prompt ends inside reasoning: its last words, control tokens spelled, end with the mark."""
    return marks is not None and prompt_end.rstrip().endswith(marks.start)


def choose_parser(
    template: str | None,
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    parallel: bool = True,
    prompt_end: str = "",
) -> OutputParser:
    """The parser of one answer.

    Args:
        template: the source of the chat template that rendered the prompt; `ChatTemplate.source` gives it.
        tools: function descriptions, as OpenAI's API has them; None or none where no call is wanted.
        parallel: whether there may be several calls.
        prompt_end: the last words of the prompt, control tokens spelled; a dozen tokens are enough.
    """
    form = find_format(template)
    return AnswerParser(
        form.reasoning,
        form.style if tools else None,
        [tool_name(tool) for tool in tools or ()],
        reasoning_open=opens_reasoning(form.reasoning, prompt_end),
        parallel=parallel,
    )


def tool_name(tool: Mapping[str, Any]) -> str:
    """The name of a tool's function."""
    name = tool.get("function", tool).get("name", "")
    return name if isinstance(name, str) else ""
