"""The answer to a conversation, in any dialect: what a choice gains in a step, and what it has at its end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from realizar.logprob_columns import LogprobColumns
from realizar.outputs import ChoiceDelta
from realizar.server.generation.token_kinds import TokenKind
from realizar.tokenizer.parsers.base import ContentDelta, ParsedDelta, ReasoningDelta, ToolCallDelta

FinishReason = Literal["stop", "length", "tool_calls"]
_NO_ARGUMENTS = msgspec.Raw(b"{}")


@dataclass(slots=True)  # one a choice and step: frozen it would take four times as long to make
class AnswerDelta:
    """The parsed output that one choice gained; `finish_reason` is set on its last delta.

    `kinds`, where they are wanted, are those of the tokens whose kind is known now, in their order: of this delta, and
    of those before whose text was still held back.
    """

    index: int
    parsed: list[ParsedDelta]
    source: ChoiceDelta
    finish_reason: FinishReason | None
    kinds: Sequence[TokenKind] = ()


@dataclass(slots=True)
class WholeCall:
    """A whole tool call; `arguments` are the text of a JSON object."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class WholeChoice:
    """One choice of an answer, put together of its deltas."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[WholeCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobColumns] = field(default_factory=list)
    kinds: list[TokenKind] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    stop_reason: str | int | None = None

    def take_in(self, delta: AnswerDelta) -> None:
        for part in delta.parsed:
            match part:
                case ContentDelta(text):
                    self.content.append(text)
                case ReasoningDelta(text):
                    self.reasoning.append(text)
                case ToolCallDelta():
                    self._take_in_call(part)
        self.token_ids += delta.source.token_ids
        if delta.source.logprobs:
            self.logprobs.append(LogprobColumns.of(delta.source.logprobs))
        self.kinds += delta.kinds
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.source.stop_reason

    def _take_in_call(self, delta: ToolCallDelta) -> None:
        if delta.index == len(self.calls):
            self.calls.append(WholeCall(delta.id or "", delta.name or ""))
        self.calls[delta.index].arguments += delta.arguments


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
