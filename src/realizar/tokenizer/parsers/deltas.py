"""`DeltaList` joins neighbouring deltas of a parser, and `HeldSpace` holds white space back. Standard library only."""

from __future__ import annotations

from collections.abc import Callable

from realizar.tokenizer.parsers.base import ContentDelta, ParsedDelta, ReasoningDelta, ToolCallDelta

SPACE = " \t\r\n"


class DeltaList:
    """Deltas in order; texts of one kind that follow each other become one delta, in time linear in their length.

    Args:
        show: makes a parsed text what the model wrote.
    """

    def __init__(self, show: Callable[[str], str]) -> None:
        self._show = show
        self._deltas: list[ParsedDelta] = []
        self._texts: list[str] = []  # of the last delta, which is not in the list yet
        self._last: ParsedDelta | None = None

    def content(self, text: str) -> None:
        """Add content; nothing for an empty text."""
        if text:
            if not isinstance(self._last, ContentDelta):
                self._begin(ContentDelta(""))
            self._texts.append(text)

    def reasoning(self, text: str) -> None:
        """Add reasoning; nothing for an empty text."""
        if text:
            if not isinstance(self._last, ReasoningDelta):
                self._begin(ReasoningDelta(""))
            self._texts.append(text)

    def call(self, delta: ToolCallDelta) -> None:
        """Add a delta of a call."""
        if not isinstance(self._last, ToolCallDelta) or self._last.index != delta.index:
            self._begin(delta)
        self._texts.append(delta.arguments)

    def take(self) -> list[ParsedDelta]:
        """Remove and return the deltas."""
        if self._last is None:
            return []
        self._begin(None)
        taken, self._deltas = self._deltas, []
        return taken

    def _begin(self, following: ParsedDelta | None) -> None:
        last, text = self._last, self._show("".join(self._texts))
        if isinstance(last, ContentDelta):
            self._deltas.append(ContentDelta(text))
        elif isinstance(last, ReasoningDelta):
            self._deltas.append(ReasoningDelta(text))
        elif last is not None:
            self._deltas.append(ToolCallDelta(last.index, last.id, last.name, text))
        self._last, self._texts = following, []


class HeldSpace:
    """Holds white space back until it is known what follows it."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def before_end(self, text: str) -> str:
        """Take in text; returns the held space and the text, without the white space at the end, which is held."""
        shown = text.rstrip(SPACE)
        if not shown:
            self._pieces.append(text)
            return ""
        before = self.take()
        if len(shown) < len(text):
            self._pieces.append(text[len(shown) :])
        return before + shown if before else shown

    def take(self) -> str:
        """Remove and return the held space."""
        if not self._pieces:
            return ""
        held, self._pieces = "".join(self._pieces), []
        return held

    def hold(self, space: str) -> None:
        """Hold more space."""
        self._pieces.append(space)
