"""The answer to a conversation, in any dialect: what a choice gains in a step, and the parts that it adds up to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from realizar.engine.frontend.outputs import ChoiceDelta
from realizar.tokenizer.parsers.base import ContentDelta, ParsedDelta, ReasoningDelta, ToolCallDelta

FinishReason = Literal["stop", "length", "tool_calls"]
PartKind = Literal["content", "reasoning", "call"]
_NO_ARGUMENTS = msgspec.Raw(b"{}")


@dataclass(slots=True)  # one a choice and step: frozen it would take four times as long to make
class AnswerDelta:
    """The parsed output that one choice gained; `finish_reason` is set on its last delta.

    `rows`, where they are wanted, are the log-probabilities of tokens as JSON: of those whose kind is known now and is
    wanted, in their order, of this delta and of those before whose text was still held back.
    """

    index: int
    parsed: list[ParsedDelta]
    source: ChoiceDelta
    finish_reason: FinishReason | None
    rows: Sequence[bytes] = ()


@dataclass(slots=True)
class AnswerPart:
    """Content or reasoning that nothing else interrupts, or one call.

    Attributes:
        index: its place among the parts of its choice.
        call: the first delta of a call.
        texts: the deltas of its text; of a call those of its arguments, the text of a JSON object.
    """

    kind: PartKind
    index: int
    call: ToolCallDelta | None
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)


class AnswerParts:
    """One choice of an answer, put together of its deltas; the last part grows.

    Attributes:
        rows: log-probabilities, as those of `AnswerDelta`.
    """

    def __init__(self, *, with_reasoning: bool = True) -> None:
        self._with_reasoning = with_reasoning
        self.parts: list[AnswerPart] = []
        self.token_ids: list[int] = []
        self.rows: list[bytes] = []
        self.finish_reason: FinishReason = "stop"
        self.stop_reason: str | int | None = None

    def take_in(self, delta: AnswerDelta) -> list[tuple[AnswerPart, str]]:
        """Take in a delta; returns the parts that it adds to, which may be new, each with its new text."""
        self.token_ids += delta.source.token_ids
        self.rows += delta.rows
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.source.stop_reason
        return [
            self._grown(parsed)
            for parsed in delta.parsed
            if self._with_reasoning or not isinstance(parsed, ReasoningDelta)
        ]

    def of(self, kind: PartKind) -> list[AnswerPart]:
        return [part for part in self.parts if part.kind == kind]

    def text(self, kind: PartKind) -> str:
        """The text of all parts of a kind."""
        return "".join(part.text for part in self.of(kind))

    def begin(self, kind: PartKind, call: ToolCallDelta | None = None) -> AnswerPart:
        part = AnswerPart(kind, len(self.parts), call)
        self.parts.append(part)
        return part

    def _grown(self, parsed: ParsedDelta) -> tuple[AnswerPart, str]:
        last = self.parts[-1] if self.parts else None
        match parsed:
            case ContentDelta(text):
                part = last if last is not None and last.kind == "content" else self.begin("content")
            case ReasoningDelta(text):
                part = last if last is not None and last.kind == "reasoning" else self.begin("reasoning")
            case ToolCallDelta(arguments=text):
                part = last if last is not None and parsed.id is None else self.begin("call", parsed)
        part.texts.append(text)
        return part, text


def arguments_object(text: str) -> msgspec.Raw:
    """The arguments of a call, as JSON of an object. One that was cut has no whole object: it is empty then.

    They are written by the module that read them: a model may write integers of any size, and halves of surrogates.
    """
    try:
        found = json.loads(text) if text else {}
        if not isinstance(found, dict):
            return _NO_ARGUMENTS
        return msgspec.Raw(json.dumps(found, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return _NO_ARGUMENTS
