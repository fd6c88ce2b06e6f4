"""Styles of tool calls with arguments between tags: GLM, Qwen3-Coder, Seed-OSS and MiniMax. Standard library only."""

from __future__ import annotations

from dataclasses import replace

from realizar.tokenizer.marks import (
    GLM_KEY,
    GLM_KEY_END,
    GLM_VALUE,
    GLM_VALUE_END,
    HERMES_CALL,
    HERMES_CALL_END,
    MINIMAX_CALLS,
    MINIMAX_CALLS_END,
    SEED_CALL,
    SEED_CALL_END,
)
from realizar.tokenizer.parsers.calls import Calls
from realizar.tokenizer.parsers.cursor import Cursor, Reading
from realizar.tokenizer.parsers.styles import CallForm, Reader, StyleName, ToolStyle, long_id
from realizar.tokenizer.parsers.tagged import Tags, read_tagged
from realizar.tokenizer.parsers.tagged_grammar import TaggedRules

_GLM_TAGS = Tags(GLM_KEY, GLM_KEY_END, GLM_VALUE_END, value_start=GLM_VALUE)
_QWEN_TAGS = Tags(
    "<parameter=", ">", "</parameter>", name_start="<function=", name_end=">", end="</function>", in_lines=True
)
_MINIMAX_TAGS = Tags(
    '<parameter name="', '">', "</parameter>", name_start='<invoke name="', name_end='">', end="</invoke>"
)


def _reader(tags: Tags, mark_end: str) -> Reader:
    def read(cursor: Cursor, calls: Calls, mark: str) -> Reading[None]:
        yield from read_tagged(cursor, calls, tags, mark, mark_end)

    return read


def _in_lines(name: StyleName, mark: str, mark_end: str, marks: tuple[str, ...]) -> ToolStyle:
    """The style of Qwen3-Coder, with its own mark around each call."""
    return ToolStyle(
        name,
        _reader(_QWEN_TAGS, mark_end),
        long_id,
        CallForm(f"{mark}\n<function=", ">\n", f"</function>\n{mark_end}", between="\n"),
        marks=marks,
        arguments=TaggedRules(_QWEN_TAGS, line_end="\n"),
    )


GLM = ToolStyle(
    "glm",
    _reader(_GLM_TAGS, HERMES_CALL_END),
    long_id,
    CallForm(HERMES_CALL, "\n", HERMES_CALL_END, between="\n"),
    marks=(HERMES_CALL,),
    arguments=TaggedRules(_GLM_TAGS, line_end="\n"),
)
# GLM-4.7 and later write no line breaks.
GLM_DENSE = replace(
    GLM,
    form=CallForm(HERMES_CALL, "", HERMES_CALL_END),
    arguments=TaggedRules(_GLM_TAGS, line_end=""),
)
# These models sometimes leave the mark around a call out.
QWEN3_CODER = _in_lines("qwen3_coder", HERMES_CALL, HERMES_CALL_END, (HERMES_CALL, "<function="))
SEED_OSS = _in_lines("seed_oss", SEED_CALL, SEED_CALL_END, (SEED_CALL,))
MINIMAX = ToolStyle(
    "minimax",
    _reader(_MINIMAX_TAGS, MINIMAX_CALLS_END),
    long_id,
    CallForm('<invoke name="', '">\n', "</invoke>\n", first=f"{MINIMAX_CALLS}\n", last=MINIMAX_CALLS_END),
    marks=(MINIMAX_CALLS,),
    arguments=TaggedRules(_MINIMAX_TAGS, line_end="\n"),
)
