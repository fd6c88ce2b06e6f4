"""The protocol of answer parsers, and their deltas of content, reasoning and tool calls. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A delta of the model's reasoning before the answer, without the marks around it."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A delta of a tool call, whose index in the answer counts from 0. The first delta of a call alone has id and name.

    The deltas' arguments concatenate to a JSON object's text, unless the model wrote none or the answer ended inside
    it.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


ParsedDelta = ContentDelta | ReasoningDelta | ToolCallDelta


class OutputParser(Protocol):
    """Parses an answer's text as it arrives. The deltas concatenate to the same result however the text is cut.

    The text comes from `StopChecker`, which spells out the control tokens that mark calls and reasoning.
    """

    def feed(self, text: str, marks: Sequence[int] = ()) -> list[ParsedDelta]:
        """Take in text and return the certain deltas; a possible beginning of a mark or a call is held back.

        Args:
            marks: where in the text tokens begin that are marks, as of `ChoiceDelta`.
        """

    def finish(self) -> list[ParsedDelta]:
        """Return the deltas that are still held back at the end of the text."""

    @property
    def ended(self) -> bool:
        """True once the only allowed call is complete. Further text is ignored, so generation may stop."""

    @property
    def in_reasoning(self) -> bool:
        """True while the text that was fed ends inside reasoning; its marks count as reasoning."""

    @property
    def num_calls(self) -> int:
        """The number of tool calls so far; above 0 the finish reason `stop` becomes `tool_calls`."""
