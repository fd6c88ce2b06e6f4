"""Texts by which models mark tool calls and reasoning in their answers. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

_HERMES = HERMES_CALL, HERMES_CALL_END = "<tool_call>", "</tool_call>"
_GRANITE = GRANITE_CALLS, GRANITE_CALLS_END = "<|tool_call|>", "<|/tool_call|>"
LLAMA_CALL = "<|python_tag|>"
_MISTRAL = MISTRAL_CALLS, MISTRAL_CALL_ID, MISTRAL_ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_DEEPSEEK = DEEPSEEK_CALLS, DEEPSEEK_CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_ONE = DEEPSEEK_CALL, DEEPSEEK_CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
DEEPSEEK_NAME_END = "<｜tool▁sep｜>"
_SEED = SEED_CALL, SEED_CALL_END = "<seed:tool_call>", "</seed:tool_call>"
_MINIMAX = MINIMAX_CALLS, MINIMAX_CALLS_END = "<minimax:tool_call>", "</minimax:tool_call>"
_GLM = GLM_KEY, GLM_KEY_END, GLM_VALUE, GLM_VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_GEMMA = GEMMA_CALL, GEMMA_CALL_END, GEMMA_QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_GEMMA_REASONING = GEMMA_CHANNEL, GEMMA_CHANNEL_END = "<|channel>", "<channel|>"
_LFM2 = LFM2_CALLS, LFM2_CALLS_END = "<|tool_call_start|>", "<|tool_call_end|>"
LFM2_TOOLS = ("<|tool_list_start|>", "List of tools: [")  # its templates ask for calls so, and may not write any
_RESPONSE = RESPONSE, RESPONSE_END = "<response>", "</response>"
HARMONY_START, HARMONY_CHANNEL, HARMONY_MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
HARMONY_CONSTRAIN, HARMONY_END, HARMONY_CALL, HARMONY_RETURN = "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The texts before and after reasoning."""

    start: str
    end: str


REASONING_MARKS = (
    ReasoningMarks("<think>", "</think>"),
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("<seed:think>", "</seed:think>"),
    ReasoningMarks(f"{GEMMA_CHANNEL}thought", GEMMA_CHANNEL_END),
)

CALL_STARTS = frozenset(
    {
        *(HERMES_CALL, GRANITE_CALLS, LLAMA_CALL, MISTRAL_CALLS, DEEPSEEK_CALLS, SEED_CALL, MINIMAX_CALLS, GEMMA_CALL),
        LFM2_CALLS,
    }
)
"""Marks with which the calls of an answer begin."""

# Control tokens with these texts are spelled out in an answer's text, so that the parsers find them.
MARKS = frozenset(
    {
        *(*_HERMES, *_GRANITE, LLAMA_CALL, *_MISTRAL, *_DEEPSEEK, *_DEEPSEEK_ONE, DEEPSEEK_NAME_END, *_SEED, *_MINIMAX),
        *(*_GLM, *_GEMMA, *_GEMMA_REASONING, *_LFM2, *_RESPONSE),
        *(mark for marks in REASONING_MARKS for mark in (marks.start, marks.end)),
    }
)
# The same for vocabularies that have all of these; they are control tokens there, whatever type a file gives them.
HARMONY_MARKS = frozenset({HARMONY_START, HARMONY_CHANNEL, HARMONY_MESSAGE, HARMONY_CONSTRAIN, HARMONY_END})
