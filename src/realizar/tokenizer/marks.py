"""Texts by which models mark tool calls and reasoning in their answers. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

HERMES_CALL, HERMES_CALL_END = "<tool_call>", "</tool_call>"
GRANITE_CALLS, GRANITE_CALLS_END = "<|tool_call|>", "<|/tool_call|>"
LLAMA_CALL = "<|python_tag|>"
MISTRAL_CALLS, MISTRAL_CALL_ID, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
DEEPSEEK_CALLS, DEEPSEEK_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_CALL, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_NAME_END = "<｜tool▁sep｜>"


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """What stands before and after reasoning."""

    start: str
    end: str


REASONING_MARKS = (
    ReasoningMarks("<think>", "</think>"),
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("<seed:think>", "</seed:think>"),
)

# Where a vocabulary has control tokens of these texts, the text of an answer holds them, for the parsers to find.
MARKS = frozenset(
    {
        HERMES_CALL,
        HERMES_CALL_END,
        GRANITE_CALLS,
        GRANITE_CALLS_END,
        LLAMA_CALL,
        MISTRAL_CALLS,
        MISTRAL_CALL_ID,
        MISTRAL_ARGUMENTS,
        DEEPSEEK_CALLS,
        DEEPSEEK_CALLS_END,
        DEEPSEEK_CALL,
        DEEPSEEK_CALL_END,
        DEEPSEEK_NAME_END,
        *(mark for marks in REASONING_MARKS for mark in (marks.start, marks.end)),
    }
)
