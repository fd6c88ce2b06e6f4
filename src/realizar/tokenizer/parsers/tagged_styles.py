"""Styles of tool calls with arguments between tags: GLM, Qwen3-Coder, Seed-OSS and MiniMax. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

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
from realizar.tokenizer.parsers.argument_types import types_of
from realizar.tokenizer.parsers.calls import Calls
from realizar.tokenizer.parsers.cursor import Cursor, Reading
from realizar.tokenizer.parsers.grammar_rules import (
    ANY_TEXT,
    allowed_values,
    check_text,
    json_rule,
    members,
    part_of,
    refuse,
)
from realizar.tokenizer.parsers.styles import CallForm, StyleName, ToolStyle, long_id
from realizar.tokenizer.parsers.tagged import Tags, read_tagged

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


_EMPTY = '""'
_KEY = r"/[A-Za-z_][A-Za-z0-9_]{0,63}/"


@dataclass(frozen=True, slots=True)
class _TaggedRules:
    """The arguments of a style with tags; they come in the schema's order.

    Attributes:
        tags: the texts around arguments.
    """

    tags: Tags

    def rules(self, rule: str, parameters: Mapping[str, Any], strict: bool, literal: Callable[[str], str]) -> list[str]:
        """As of `ArgumentRules`."""
        parts: list[str] = []
        rules: list[str] = []
        for place, (key, schema, required) in enumerate(members(parameters, strict)):
            name = f"{rule}_{place}"
            parts.append(name if required else f"{name}?")
            rules.append(f"{name}: {literal(self._head(key))} {name}_value")
            rules += self._value(f"{name}_value", schema, parameters, strict, literal)
        if not parts and parameters.get("additionalProperties"):
            name = f"{rule}_any"
            parts.append(f"{name}*")
            start, _, end = self._head("\0").partition("\0")
            rules.append(f"{name}: {literal(start)} {_KEY} {literal(end)} {name}_value")
            rules += self._text(f"{name}_value", literal)
        return [f"{rule}: {' '.join(parts) or _EMPTY}", *rules]

    def _head(self, key: str) -> str:
        tags = self.tags
        return tags.key_start + key + tags.key_end + (self._opening if tags.value_start else "") + self._line

    @property
    def _opening(self) -> str:
        return self.tags.line_end + self.tags.value_start

    @property
    def _line(self) -> str:
        return "\n" if self.tags.in_lines else ""

    @property
    def _tail(self) -> str:
        return self._line + self.tags.value_end + self.tags.line_end

    def _value(
        self, rule: str, schema: Any, root: Mapping[str, Any], strict: bool, literal: Callable[[str], str]
    ) -> list[str]:
        part = part_of(schema, root)
        values = allowed_values(part)
        if values is not None:
            texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
            if any(self.tags.value_end in text for text in texts):
                if strict:
                    refuse(f"a value with {self.tags.value_end} in it")
                return self._text(rule, literal)
            return [f"{rule}: ({' | '.join(literal(text) or _EMPTY for text in texts)}) {literal(self._tail)}"]
        types = types_of(part, root)
        if "string" in types:
            check_text(part, types, strict)
            return self._text(rule, literal)
        return [f"{rule}: {rule}_json {literal(self._tail)}", json_rule(f"{rule}_json", part, strict)]

    def _text(self, rule: str, literal: Callable[[str], str]) -> list[str]:
        """Any text, which ends where its end begins first."""
        tail = literal(self._tail)
        lazy = "" if "<[" in tail else "[lazy]"  # a control token is no text, and so ends it
        return [f"{rule}{lazy}: {ANY_TEXT} {tail}"]


def _style(name: StyleName, tags: Tags, form: CallForm, *other_marks: str) -> ToolStyle:
    def read(cursor: Cursor, calls: Calls, mark: str) -> Reading[None]:
        yield from read_tagged(cursor, calls, tags, mark)

    return ToolStyle(name, read, long_id, form, marks=(tags.mark, *other_marks), arguments=_TaggedRules(tags))


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
