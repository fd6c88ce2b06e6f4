"""Grammars, in llguidance's Lark, that force tool calls in a model's own style, with arguments by their schemas.

Control tokens are written by id, `<[7]>`. Keywords of a schema that can't be enforced are ignored unless the tool is
strict. Standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from realizar.errors import InvalidRequestError
from realizar.sampling_params import StructuredOutput
from realizar.tokenizer.marks import (
    HARMONY_CHANNEL,
    HARMONY_END,
    HARMONY_MARKS,
    HARMONY_MESSAGE,
    HARMONY_START,
    ReasoningMarks,
)
from realizar.tokenizer.parsers.choose import AnswerFormat, is_strict, tool_name, tool_parameters
from realizar.tokenizer.parsers.grammar_rules import ANY_TEXT, json_rule
from realizar.tokenizer.parsers.styles import CallForm


def call_grammar(
    form: AnswerFormat,
    tools: Sequence[Mapping[str, Any]],
    *,
    required: bool = False,
    name: str | None = None,
    parallel: bool = True,
    mark_ids: Mapping[str, int] | None = None,
    reasoning_open: bool = False,
) -> StructuredOutput | None:
    """Make the grammar of an answer; None if the answer is free.

    `required` and `name` force a call. Otherwise the model decides, and if a tool is `strict`, calls follow the schemas
    once they have begun. Reasoning before the answer stays free.

    Args:
        form: format of the model's answers, from `find_format`.
        tools: function descriptions in the format of OpenAI's API.
        required: True if there must be a call.
        name: the name of the tool that must be called.
        parallel: True if several calls are allowed.
        mark_ids: the marks that the vocabulary has as tokens.
        reasoning_open: True if the prompt ends inside reasoning.

    Raises:
        InvalidRequestError: no tool has this name, or a strict tool's schema can't be enforced.
    """
    if name is not None:
        tools = [tool for tool in tools if tool_name(tool) == name]
        if not tools:
            raise InvalidRequestError(f"tool_choice names {name!r}, which is not in tools", "tool_choice")
    forced = required or name is not None
    if not forced and not any(is_strict(tool) for tool in tools):
        return None
    if form.in_channels and not (mark_ids or {}).keys() >= HARMONY_MARKS:
        raise InvalidRequestError("calls can't be enforced: the vocabulary lacks the marks of the template", "tools")
    writer = _Writer(form, tools, parallel, mark_ids or {})
    rules = writer.forced() if forced else writer.free()
    prefix = ""
    if form.in_channels:
        rules += writer.earlier_messages()
        prefix = "earlier* "
    elif form.reasoning is not None:
        rules += writer.reasoning(form.reasoning)
        prefix = "reasoning " if reasoning_open else "(reasoning_start reasoning)? "
    return StructuredOutput("lark", "\n".join([f"start: {prefix}answer", *rules, ""]))


def tool_of_rule(rule: str, tools: Sequence[Mapping[str, Any]], name: str | None = None) -> str | None:
    """The name of the tool whose arguments a rule of `call_grammar`, called with these tools and name, writes."""
    found = re.match(r"arguments_(\d+)", rule)
    if found is None:
        return None
    return tool_name(tools[int(found[1])]) if name is None else name


class _Writer:
    """Writes the rules of one grammar."""

    def __init__(
        self, form: AnswerFormat, tools: Sequence[Mapping[str, Any]], parallel: bool, mark_ids: Mapping[str, int]
    ) -> None:
        self._style, self._tools, self._parallel, self._ids = form.style, tools, parallel, mark_ids
        self._reasoning, self._in_channels = form.reasoning, form.in_channels
        marks = sorted(mark_ids, key=len, reverse=True)
        self._marks = re.compile("(" + "|".join(map(re.escape, marks)) + ")") if marks else None

    def forced(self) -> list[str]:
        """Rules for calls only."""
        several = self._parallel and not self._in_channels  # a call in a channel ends the answer
        return ["answer: calls", *self._calls(self._style.form, several)]

    def free(self) -> list[str]:
        """Rules for text in which calls may start."""
        form = self._style.form
        if self._in_channels:
            return ["answer: calls | said", self._said(), *self._calls(form, parallel=False)]
        if self._style.first_marks or self._style.line_marks:
            return ["answer: calls | FREE", f"FREE: {self._free_text()}", *self._calls(form, self._parallel)]
        mark = self._style.marks[0]
        answer = f"answer: (before calls){'*' if self._parallel else '?'} TEXT"
        if mark in self._ids:
            return [answer, "before: TEXT", f"TEXT: {ANY_TEXT}", *self._calls(form, self._parallel)]
        # The lexer ends the text at the mark, so the calls' rules omit the mark.
        rules = [answer, f"before[lazy]: TEXT {self._text(mark)}", f"TEXT: {ANY_TEXT}"]
        if form.first:
            return [*rules, *self._calls(replace(form, first=form.first.removeprefix(mark)), self._parallel)]
        return [*rules, *self._calls(replace(form, before_name=form.before_name.removeprefix(mark)), parallel=False)]

    def earlier_messages(self) -> list[str]:
        """The rule `earlier` of a message in a channel before the last one: reasoning, or words before a call."""
        end = self._text(f"{HARMONY_END}{HARMONY_START}assistant")
        start = f'{self._text(HARMONY_CHANNEL)} ("analysis" | "commentary") {self._text(HARMONY_MESSAGE)}'
        return [f"earlier: {start} {ANY_TEXT} {end}"]

    def _said(self) -> str:
        """The rule `said` of the last message in a channel, if it is no call."""
        channels = '("final" | "commentary" | "analysis")'
        return f"said: {self._text(HARMONY_CHANNEL)} {channels} {self._text(HARMONY_MESSAGE)} {ANY_TEXT}"

    def _free_text(self) -> str:
        """Text whose lines (or whose beginning) do not start like a call, and whose beginning does not start reasoning.

        The lexer takes the longest match, so reasoning would otherwise count as text to the end.
        """
        not_first = "" if self._reasoning is None else re.escape(self._reasoning.start[0])
        if self._style.first_marks:
            return rf"/[ \t\r\n]*([^ \t\r\n{{{not_first}](.|\n)*)?/"
        line = r"(([^{\[`\n%s][^\n]*)|(`[^{\[\n]*))?"
        return f"/{line % not_first}(\\n{line % ''})*/"

    def _calls(self, form: CallForm, parallel: bool) -> list[str]:
        """The rule `calls` and the rules that it uses."""
        several = f"call ({self._text(form.between)} call)*" if parallel else "call"
        all_calls = f"{self._text(form.first)} {several} {self._text(form.last)}".strip()
        if form.alone:
            all_calls = f"call | {all_calls}" if parallel else "call"
        numbers = range(len(self._tools))
        rules = [f"calls: {all_calls}", "call: " + " | ".join(f"call_{number}" for number in numbers)]
        for number, tool in zip(numbers, self._tools, strict=True):
            head = self._text(form.before_name + tool_name(tool) + form.before_arguments)
            rules.append(f"call_{number}: {head} arguments_{number} {self._text(form.after)}".rstrip())
            parameters = {"type": "object", **(tool_parameters(tool) or {"properties": {}})}
            if self._style.arguments is None:
                rules.append(json_rule(f"arguments_{number}", parameters, is_strict(tool)))
            else:
                rules += self._style.arguments.rules(f"arguments_{number}", parameters, is_strict(tool), self._text)
        return rules

    def _text(self, literal: str) -> str:
        """A literal as a sequence of strings and control tokens; empty for an empty literal."""
        parts = self._marks.split(literal) if self._marks is not None else [literal]
        return " ".join(
            f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    def reasoning(self, marks: ReasoningMarks) -> list[str]:
        """The rules `reasoning_start` and `reasoning`, which ends with the end mark."""
        start = f"reasoning_start: {self._text(marks.start)}"
        if marks.end in self._ids:
            return [
                start,
                f"reasoning: THOUGHT {self._text(marks.end)} GAP",
                f"THOUGHT: {ANY_TEXT}",
                r"GAP: /\n{0,2}/",
            ]
        return [
            start,
            "reasoning: thought GAP",
            f"thought[lazy]: THOUGHT {self._text(marks.end)}",
            f"THOUGHT: {ANY_TEXT}",
            r"GAP: /\n{0,2}/",
        ]
