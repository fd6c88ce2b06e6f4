"""Answers in channels as text for a terminal: thoughts between marks, as most models write them, then the content."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from realizar.tokenizer.parsers.base import ContentDelta, ParsedDelta, ReasoningDelta

if TYPE_CHECKING:
    from realizar.engine.frontend.outputs import ChoiceDelta
    from realizar.tokenizer.parsers.choose import AnswerFormat

_THOUGHT, _THOUGHT_END = "<think>\n", "\n</think>\n\n"


class ChannelText:
    """The text of one answer after the other.

    `marks` are those that the vocabulary has as tokens; spelled otherwise, they are text.
    """

    def __init__(self, form: AnswerFormat, marks: Collection[str]) -> None:
        self._form, self._marks = form, frozenset(marks)
        self._said: list[str] = []
        self._thinks = False

    @property
    def content(self) -> str:
        """The last answer without its thoughts, which the template does not show to the model again."""
        return "".join(self._said)

    def texts(self, deltas: Iterable[ChoiceDelta]) -> Iterator[str]:
        from realizar.tokenizer.parsers.choose import choose_parser  # which a command's help does not need

        parser = choose_parser(self._form, None, tokens=self._marks)
        self._said.clear()
        self._thinks = False
        for delta in deltas:
            yield from map(self._shown, parser.feed(delta.text, delta.marks))
        yield from map(self._shown, parser.finish())

    def _shown(self, delta: ParsedDelta) -> str:
        if isinstance(delta, ReasoningDelta):
            before = "" if self._thinks else _THOUGHT
            self._thinks = True
            return before + delta.text
        if isinstance(delta, ContentDelta):
            before = _THOUGHT_END if self._thinks else ""
            self._thinks = False
            self._said.append(delta.text)
            return before + delta.text
        return ""
