"""Deltas of content, reasoning and tool calls, which parsers of answers give. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


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
