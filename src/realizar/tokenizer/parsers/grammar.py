"""Grammars, in llguidance's Lark, of whole answers: reasoning if the model reasons, then calls or a constrained text.

Calls are written in the model's own style, with arguments by their schemas. Control tokens are written by id, `<[7]>`.
Keywords of a schema that can't be enforced are ignored unless the tool is strict. Standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from realizar.errors import InvalidRequestError
from realizar.sampling_params import NESTED_GRAMMAR, StructuredOutput
from realizar.tokenizer.marks import (
    HARMONY_CHANNEL,
    HARMONY_END,
    HARMONY_MARKS,
    HARMONY_MESSAGE,
    HARMONY_START,
    ReasoningMarks,
)
from realizar.tokenizer.parsers.choose import (
    AnswerFormat,
    closes_reasoning,
    is_strict,
    opens_reasoning,
    tool_name,
    tool_parameters,
)
from realizar.tokenizer.parsers.grammar_rules import ANY_TEXT, json_rule
from realizar.tokenizer.parsers.styles import CallForm
from realizar.tokenizer.templates.chat_messages import Tools

FINAL = "final"  # the channel of an answer
_NO_PARAMETERS: Mapping[str, Any] = {"properties": {}, "additionalProperties": False}


def call_grammar(
    form: AnswerFormat,
    tools: Tools,
    *,
    structured: StructuredOutput | None = None,
    required: bool = False,
    name: str | None = None,
    parallel: bool = True,
    mark_ids: Mapping[str, int] | None = None,
    prompt_end: str = "",
) -> StructuredOutput | None:
    """Make the grammar of an answer; None if the answer is free.

    `required` and `name` force a call. Otherwise the model decides: it calls, or gives its answer, by `structured` if
    that is there. If a tool is `strict`, calls follow the schemas once they have begun. Reasoning before calls and
    answer stays free, unless the prompt has closed it.

    Args:
        form: format of the model's answers, from `find_format`.
        tools: function descriptions in the format of OpenAI's API.
        structured: what an answer that is no call must follow; it has no part where a call is forced.
        name: the name of the tool that must be called.
        mark_ids: the marks that the vocabulary has as tokens.
        prompt_end: the last words of the prompt, with control tokens spelled out.

    Raises:
        InvalidRequestError: no tool has this name, or a strict tool's schema can't be enforced.
    """
    if name is not None:
        tools = [tool for tool in tools if tool_name(tool) == name]
        if not tools:
            raise InvalidRequestError(f"tool_choice names {name!r}, which is not in tools", "tool_choice")
    forced = required or name is not None
    if forced:
        structured = None
    elif structured is None and not any(is_strict(tool) for tool in tools):
        return None
    if form.in_channels and not (mark_ids or {}).keys() >= HARMONY_MARKS:
        what = "tools" if structured is None else "structured"
        raise InvalidRequestError("answers can't be constrained: the vocabulary lacks the marks of the template", what)
    writer = _Writer(form, tools, parallel, mark_ids or {}, beside_json=structured is not None)
    prefix, rules = writer.before(prompt_end)
    if structured is None:
        rules = [f"start: {prefix}answer", *(writer.forced() if forced else writer.free()), *rules, ""]
        return StructuredOutput("lark", "\n".join(rules))
    if not prefix and not tools:
        return structured
    rules = [f"start: {prefix}answer", *writer.calls_or_nested(), *rules, ""]
    return StructuredOutput("nested", json.dumps(["\n".join(rules), structured.kind, structured.value]))


def tool_of_rule(rule: str, tools: Tools, name: str | None = None) -> str | None:
    """The name of the tool whose arguments a rule of `call_grammar`, called with these tools and name, writes."""
    found = re.match(r"arguments_(\d+)", rule)
    if found is None:
        return None
    return tool_name(tools[int(found[1])]) if name is None else name


class _Writer:
    """Writes the rules of one grammar.

    With `beside_json` an answer in JSON may stand in place of calls. Calls that begin as one are a schema's then, with
    its white space: the lexer would take a longer literal for the call alone.
    """

    def __init__(
        self,
        form: AnswerFormat,
        tools: Tools,
        parallel: bool,
        mark_ids: Mapping[str, int],
        *,
        beside_json: bool = False,
    ) -> None:
        self._style, self._tools, self._parallel, self._ids = form.style, tools, parallel, mark_ids
        self._reasoning, self._in_channels = form.reasoning, form.in_channels
        marks = sorted(mark_ids, key=len, reverse=True)
        self._as_objects = beside_json and form.style.form.begins_as_json
        self._marks = re.compile("(" + "|".join(map(re.escape, marks)) + ")") if marks else None

    def before(self, prompt_end: str) -> tuple[str, list[str]]:
        """What may come before the answer, with a space behind it, and its rules."""
        marks = self._reasoning
        if self._in_channels:
            return "earlier* ", self._earlier_messages()
        if marks is None or closes_reasoning(marks, prompt_end):
            return "", []
        is_open = opens_reasoning(marks, prompt_end)
        return "reasoning " if is_open else "(reasoning_start reasoning)? ", self._reasoning_rules(marks)

    def forced(self) -> list[str]:
        return ["answer: calls", *self._all_calls()]

    def calls_or_nested(self) -> list[str]:
        nested = f"{self._header(FINAL)} @{NESTED_GRAMMAR}" if self._in_channels else f"@{NESTED_GRAMMAR}"
        return [f"answer: calls | {nested}", *self._all_calls()] if self._tools else [f"answer: {nested}"]

    def _all_calls(self) -> list[str]:
        """The rules of `_calls` where nothing stands beside calls: one in a channel ends the answer."""
        return self._calls(self._style.form, self._parallel and not self._in_channels)

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

    def _earlier_messages(self) -> list[str]:
        """The rule `earlier` of a message in a channel before the last one: reasoning, or words before a call."""
        end = self._text(f"{HARMONY_END}{HARMONY_START}assistant")
        return [f"earlier: {self._header('analysis', 'commentary')} {ANY_TEXT} {end}"]

    def _said(self) -> str:
        return f"said: {self._header(FINAL, 'commentary', 'analysis')} {ANY_TEXT}"

    def _header(self, *channels: str) -> str:
        names = " | ".join(map(json.dumps, channels))
        return f"{self._text(HARMONY_CHANNEL)} ({names}) {self._text(HARMONY_MESSAGE)}"

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
        several = f"call ({self._text(form.between)} call)*" if parallel else "call"
        all_calls = f"{self._text(form.first)} {several} {self._text(form.last)}".strip()
        if form.alone:
            all_calls = f"call | {all_calls}" if parallel else "call"
        numbers = range(len(self._tools))
        rules = [f"calls: {all_calls}", "call: " + " | ".join(f"call_{number}" for number in numbers)]
        for number, tool in zip(numbers, self._tools, strict=True):
            head = form.before_name + tool_name(tool) + form.before_arguments
            parameters = {"type": "object", **(tool_parameters(tool) or _NO_PARAMETERS)}
            if self._as_objects:
                schema = _call_schema(json.loads(f"{head}null{form.after}"), parameters)
                rules += [
                    f"call_{number}: arguments_{number}",
                    json_rule(f"arguments_{number}", schema, is_strict(tool), {}),
                ]
                continue
            rules.append(f"call_{number}: {self._text(head)} arguments_{number} {self._text(form.after)}".rstrip())
            if self._style.arguments is None:
                rules.append(json_rule(f"arguments_{number}", parameters, is_strict(tool)))
            else:
                rules += self._style.arguments(f"arguments_{number}", parameters, is_strict(tool), self._text)
        return rules

    def _text(self, literal: str) -> str:
        parts = self._marks.split(literal) if self._marks is not None else [literal]
        return " ".join(
            f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    def _reasoning_rules(self, marks: ReasoningMarks) -> list[str]:
        end = self._text(marks.end)
        how = ["reasoning: thought GAP", f"thought[lazy]: THOUGHT {end}"]
        if marks.end in self._ids:
            how = [f"reasoning: THOUGHT {end} GAP"]
        start = f"reasoning_start: {self._text(marks.start)}"
        return [start, *how, f"THOUGHT: {ANY_TEXT}", r"GAP: /\n{0,2}/"]


def _call_schema(call: Mapping[str, Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a call. Its arguments, None in `call`, have an id of their own, so that references stay within."""
    arguments = {"$id": "urn:arguments", **parameters}
    properties = {key: arguments if value is None else {"const": value} for key, value in call.items()}
    return {"type": "object", "properties": properties, "required": [*call], "additionalProperties": False}
