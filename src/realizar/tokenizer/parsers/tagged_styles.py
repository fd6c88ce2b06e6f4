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
from realizar.tokenizer.parsers.styles import CallForm, StyleName, ToolStyle, long_id
from realizar.tokenizer.parsers.tagged import Tags, read_tagged
from realizar.tokenizer.parsers.tagged_grammar import TaggedRules

_GLM_TAGS = Tags(HERMES_CALL, HERMES_CALL_END, GLM_KEY, GLM_KEY_END, GLM_VALUE_END, value_start=GLM_VALUE)
_DENSE_TAGS = replace(_GLM_TAGS, line_end="")
_SEED_TAGS = Tags(
    SEED_CALL,
    SEED_CALL_END,
    "<parameter=",
    ">",
    "</parameter>",
    name_start="<function=",
    name_end=">",
    end="</function>",
)
_QWEN_TAGS = replace(_SEED_TAGS, mark=HERMES_CALL, mark_end=HERMES_CALL_END, in_lines=True)
_MINIMAX_TAGS = Tags(
    MINIMAX_CALLS,
    MINIMAX_CALLS_END,
    '<parameter name="',
    '">',
    "</parameter>",
    name_start='<invoke name="',
    name_end='">',
    end="</invoke>",
)


def _style(name: StyleName, tags: Tags, form: CallForm, *other_marks: str) -> ToolStyle:
    def read(cursor: Cursor, calls: Calls, mark: str) -> Reading[None]:
        yield from read_tagged(cursor, calls, tags, mark)

    return ToolStyle(name, read, long_id, form, marks=(tags.mark, *other_marks), arguments=TaggedRules(tags))


def _function_form(tags: Tags) -> CallForm:
    return CallForm(f"{tags.mark}\n<function=", ">\n", f"</function>\n{tags.mark_end}", between="\n")


GLM = _style("glm", _GLM_TAGS, CallForm(HERMES_CALL, "\n", HERMES_CALL_END, between="\n"))
# GLM-4.7 and later write no line breaks.
GLM_DENSE = _style("glm", _DENSE_TAGS, CallForm(HERMES_CALL, "", HERMES_CALL_END))
# These models sometimes leave the mark around a call out.
QWEN3_CODER = _style("qwen3_coder", _QWEN_TAGS, _function_form(_QWEN_TAGS), "<function=")
SEED_OSS = _style("seed_oss", _SEED_TAGS, _function_form(_SEED_TAGS))
MINIMAX = _style(
    "minimax",
    _MINIMAX_TAGS,
    CallForm('<invoke name="', '">\n', "</invoke>\n", first=f"{MINIMAX_CALLS}\n", last=MINIMAX_CALLS_END),
)
