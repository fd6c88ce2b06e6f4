"""Rules of arguments between tags, for grammars that force calls. Standard library only."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from realizar.tokenizer.parsers.argument_types import types_of
from realizar.tokenizer.parsers.grammar_rules import (
    ANY_TEXT,
    allowed_values,
    check_text,
    json_rule,
    members,
    part_of,
    refuse,
)
from realizar.tokenizer.parsers.tagged import Tags

_EMPTY = '""'
_KEY = r"/[A-Za-z_][A-Za-z0-9_]{0,63}/"


@dataclass(frozen=True, slots=True)
class TaggedRules:
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
        """A value and its end."""
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
