"""`OutputItems`: the items of an answer, as it grows: reasoning, text and calls, in the order in which they begin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from realizar.server.api import new_id
from realizar.server.responses.reasoning import sealed
from realizar.server.responses.tools import text_of
from realizar.tokenizer.parsers.base import ContentDelta, ParsedDelta, ReasoningDelta, ToolCallDelta

ItemKind = Literal["message", "reasoning", "function_call", "custom_tool_call"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
_PREFIXES: Mapping[ItemKind, str] = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "custom_tool_call": "ctc_",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemForm:
    """The form that a request wants items in.

    Attributes:
        as_summary: reasoning is a summary.
        is_sealed: reasoning is also given in `encrypted_content`.
        namespaces: the namespace and the name of functions that have one, by the names that the model writes.
        custom: names of tools whose input is text.
    """

    as_summary: bool = False
    is_sealed: bool = False
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    custom: frozenset[str] = frozenset()


@dataclass(slots=True, kw_only=True)
class Item:
    """One item. Attributes: texts: deltas of its text, or of a call's arguments. call: a call's first delta."""

    kind: ItemKind
    id: str
    index: int
    call: ToolCallDelta | None = None
    texts: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its text, or a call's arguments; of a custom call its input."""
        text = "".join(self.texts)
        return text_of(text) if self.kind == "custom_tool_call" else text

    @property
    def is_call(self) -> bool:
        return self.kind in ("function_call", "custom_tool_call")

    def record(self, form: ItemForm, status: ItemStatus) -> dict[str, Any]:
        """The item as JSON; without its text while it is in progress."""
        begun = status == "in_progress"
        match self.kind:
            case "message":
                content = [] if begun else [self.text_part(self.text)]
                return self._base(status, role="assistant", content=content)
            case "reasoning":
                return self._reasoning(form, status)
            case "custom_tool_call" if self.call is not None:
                return self._base(status, call_id=self.call.id, name=self.call.name, input="" if begun else self.text)
            case _:
                return self._call(form, status)

    def text_part(self, text: str) -> dict[str, Any]:
        logprobs = msgspec.Raw(b"[%b]" % b",".join(self.logprobs))
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _reasoning(self, form: ItemForm, status: ItemStatus) -> dict[str, Any]:
        shown = [] if status == "in_progress" else [self.text]
        summary = [summary_part(text) for text in shown if form.as_summary]
        item = self._base(status, summary=summary)
        if not form.as_summary:
            item["content"] = [reasoning_part(text) for text in shown]
        if form.is_sealed:
            item["encrypted_content"] = sealed(shown[0]) if shown else None
        return item

    def _call(self, form: ItemForm, status: ItemStatus) -> dict[str, Any]:
        call = self.call or ToolCallDelta(0, "", "", "")
        namespace, name = form.namespaces.get(call.name or "", (None, call.name))
        item = self._base(status, call_id=call.id, name=name, arguments=self.text)
        return item if namespace is None else {**item, "namespace": namespace}

    def _base(self, status: ItemStatus, **fields: Any) -> dict[str, Any]:
        return {"id": self.id, "type": self.kind, "status": status, **fields}


def reasoning_part(text: str) -> dict[str, str]:
    return {"type": "reasoning_text", "text": text}


def summary_part(text: str) -> dict[str, str]:
    """The same as a summary."""
    return {"type": "summary_text", "text": text}


class OutputItems:
    """The items so far; the last one grows."""

    def __init__(self, form: ItemForm) -> None:
        self.form = form
        self._items: list[Item] = []

    @property
    def last(self) -> Item | None:
        return self._items[-1] if self._items else None

    def take_in(self, part: ParsedDelta) -> tuple[Item, str]:
        """Append what the answer gained; returns the item, which may be new, and its new text."""
        match part:
            case ContentDelta(text):
                item = self._of("message")
            case ReasoningDelta(text):
                item = self._of("reasoning")
            case ToolCallDelta(arguments=text):
                item = self._of(self._kind_of(part), part)
        if text:
            item.texts.append(text)
        return item, text

    def begin_message(self) -> Item:
        """Begin a message without text: an answer without anything else is one."""
        return self._of("message")

    def records(self, *, is_whole: bool) -> list[dict[str, Any]]:
        """All items; the last one is incomplete unless the answer is whole."""
        ends: list[ItemStatus] = ["completed"] * len(self._items)
        if ends and not is_whole:
            ends[-1] = "incomplete"
        return [item.record(self.form, status) for item, status in zip(self._items, ends, strict=True)]

    def _kind_of(self, part: ToolCallDelta) -> ItemKind:
        """The kind of a call; only its first delta has the name."""
        if part.id:
            return "custom_tool_call" if part.name in self.form.custom else "function_call"
        return "function_call" if self.last is None else self.last.kind

    def _of(self, kind: ItemKind, call: ToolCallDelta | None = None) -> Item:
        last = self.last
        if last is not None and last.kind == kind and (call is None or last.call is None or not call.id):
            return last
        item = Item(kind=kind, id=new_id(_PREFIXES[kind]), index=len(self._items), call=call)
        self._items.append(item)
        return item
