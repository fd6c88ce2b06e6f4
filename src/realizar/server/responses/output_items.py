"""`OutputItems`: the items of an answer, as it grows: reasoning, text and calls, in the order in which they begin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from realizar.server.api import new_id
from realizar.server.generation.answer import AnswerDelta, AnswerPart, AnswerParts, FinishReason
from realizar.server.responses.reasoning import sealed
from realizar.server.responses.tools import ResponseTools, text_of

ItemKind = Literal["message", "reasoning", "function_call", "custom_tool_call"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
PREFIXES: Mapping[str, str] = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
}
"""Beginnings of ids of items, by their types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemForm:
    """The form that a request wants items in.

    Attributes:
        as_summary: reasoning is a summary.
        is_sealed: reasoning is also given in `encrypted_content`.
    """

    tools: ResponseTools
    as_summary: bool
    is_sealed: bool


@dataclass(slots=True)
class Item:
    """One item of an answer: a part of it in the form of the request."""

    part: AnswerPart
    form: ItemForm
    kind: ItemKind
    id: str
    logprobs: list[bytes] = field(default_factory=list)

    @classmethod
    def of(cls, part: AnswerPart, form: ItemForm) -> Item:
        kind: ItemKind
        if part.call is not None:
            kind = "custom_tool_call" if part.call.name in form.tools.custom else "function_call"
        else:
            kind = "message" if part.kind == "content" else "reasoning"
        return cls(part, form, kind, new_id(PREFIXES[kind]))

    @property
    def text(self) -> str:
        """Its text, or a call's arguments; of a custom call its input."""
        return text_of(self.part.text) if self.kind == "custom_tool_call" else self.part.text

    def record(self, status: ItemStatus) -> dict[str, Any]:
        """The item as JSON; without its text while it is in progress."""
        base: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        text = None if status == "in_progress" else self.text
        if self.part.call is None:
            shown = [] if text is None else [self.text_part(text)]
            if self.kind == "message":
                return {**base, "role": "assistant", "content": shown}
            item = {**base, "summary": shown} if self.form.as_summary else {**base, "summary": [], "content": shown}
            if self.form.is_sealed:
                item["encrypted_content"] = None if text is None else sealed(text)
            return item
        namespace, name = self.form.tools.namespaces.get(self.part.call.name or "", (None, self.part.call.name))
        written = "input" if self.kind == "custom_tool_call" else "arguments"
        item = {**base, "call_id": self.part.call.id, "name": name, written: text or ""}
        return item if namespace is None else {**item, "namespace": namespace}

    def text_part(self, text: str) -> dict[str, Any]:
        """The part of a message or of reasoning that has its text."""
        if self.kind == "reasoning":
            return {"type": "summary_text" if self.form.as_summary else "reasoning_text", "text": text}
        logprobs = msgspec.Raw(b"[%b]" % b",".join(self.logprobs if text else ()))  # a message begins without any
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


class OutputItems:
    """The items so far; the last one grows."""

    def __init__(self, form: ItemForm) -> None:
        self._form, self._parts = form, AnswerParts()
        self._items: list[Item] = []

    @property
    def finish_reason(self) -> FinishReason:
        return self._parts.finish_reason

    def take_in(self, delta: AnswerDelta) -> list[tuple[Item, str, list[bytes]]]:
        """Take in a delta.

        Returns the items that it adds to, which may be new, with their new texts and log-probabilities of new tokens.
        An answer that ends without anything is a message without text.
        """
        grown = self._parts.take_in(delta)
        if delta.finish_reason is not None and not self._parts.parts:
            grown.append((self._parts.begin("content"), ""))
        return [self._grown(part, text) for part, text in grown]

    def records(self, *, is_whole: bool) -> list[dict[str, Any]]:
        """All items; the last one is incomplete unless the answer is whole."""
        ends: list[ItemStatus] = ["completed"] * len(self._items)
        if ends and not is_whole:
            ends[-1] = "incomplete"
        return [item.record(status) for item, status in zip(self._items, ends, strict=True)]

    def _grown(self, part: AnswerPart, text: str) -> tuple[Item, str, list[bytes]]:
        if part.index == len(self._items):
            self._items.append(Item.of(part, self._form))
        item, rows = self._items[part.index], list[bytes]()
        if item.kind == "message":  # the tokens of its text may have been listed before
            rows, self._parts.rows = self._parts.rows, []
            item.logprobs += rows
        return item, text, rows
