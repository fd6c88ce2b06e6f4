"""What a parser of answers gives: pieces of content, of reasoning and of tool calls. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """A piece of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of what the model thinks before it answers; without the marks around it."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call.

    Attributes:
        index: of the call in the answer, from 0.
        id, name: with the first piece of a call, and only there.
        arguments: a piece of the arguments' JSON text; may be empty in the first piece. The pieces of a call
            concatenate to a JSON object, unless the model wrote none or was cut short inside it.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


ParsedDelta = ContentDelta | ReasoningDelta | ToolCallDelta


class OutputParser(Protocol):
    """Takes an answer's text as it comes. However the text is cut, the pieces concatenate to the same result.

    The text is that of `StopChecker`, in which the control tokens that mark calls and reasoning are spelled out.
    """

    def feed(self, text: str) -> list[ParsedDelta]:
        """What a piece of text makes certain; what may yet become a mark or a call is held back."""

    def finish(self) -> list[ParsedDelta]:
        """What is still held back, when the text has ended."""

    @property
    def ended(self) -> bool:
        """Whether nothing that follows counts: the one call that was allowed is complete. Generation may stop."""

    @property
    def num_calls(self) -> int:
        """Tool calls given out so far; above 0 the finish reason `stop` becomes `tool_calls`."""
