"""`IncrementalParser`: what every parser of answers shares. A subclass writes its steps. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from realizar.tokenizer.parsers.base import ContentDelta, ParsedDelta
from realizar.tokenizer.parsers.calls import AnswerEndedError, Calls
from realizar.tokenizer.parsers.cursor import Cursor, Reading
from realizar.tokenizer.parsers.deltas import DeltaList
from realizar.tokenizer.parsers.spelled_marks import SpelledMarks


class IncrementalParser:
    """Feeds arriving text to a generator of steps; an `OutputParser`.

    Args:
        tools: the parameters' JSON schema of each tool, by name.
        new_id: makes the id of a call.
        parallel: True if several calls are allowed; otherwise the answer ends with the first.
        tokens: marks that the vocabulary has as tokens: they count at the places alone that `feed` is told of.
    """

    def __init__(
        self,
        tools: Mapping[str, Mapping[str, Any]],
        new_id: Callable[[], str],
        *,
        parallel: bool = True,
        tokens: frozenset[str] = frozenset(),
    ) -> None:
        self._spelled = SpelledMarks(tokens)
        self._cursor = Cursor(tokens)
        self._deltas = DeltaList(self._spelled.show)
        self._calls = Calls(tools, new_id, self._deltas.call, self._spelled.show, parallel=parallel)
        self._ended = self._rest_is_content = self._in_reasoning = False
        self._steps = self._answer()

    def _answer(self) -> Reading[None]:
        """Parse the answer; called once, and run as text arrives."""
        raise NotImplementedError

    @property
    def ended(self) -> bool:
        """True once the only allowed call is complete; further text is ignored."""
        return self._ended

    @property
    def in_reasoning(self) -> bool:
        """True while the text that was fed ends inside reasoning."""
        return self._in_reasoning

    @property
    def num_calls(self) -> int:
        """The number of calls so far."""
        return self._calls.count

    def feed(self, text: str, marks: Sequence[int] = ()) -> list[ParsedDelta]:
        """Take in text and return the certain deltas."""
        return self._take(self._spelled.hide(text, marks))

    def finish(self) -> list[ParsedDelta]:
        """Return the deltas that are still held back; nothing may be fed afterwards."""
        if self._ended or self._cursor.ended:
            return []
        rest = self._take(self._spelled.finish())
        self._cursor.ended = True
        return [*rest, *self._go_on()]

    def _take(self, text: str) -> list[ParsedDelta]:
        if not text or self._ended:
            return []
        if self._rest_is_content:
            return [ContentDelta(self._spelled.show(text))]
        self._cursor.append(text)
        return self._go_on()

    def _go_on(self) -> list[ParsedDelta]:
        try:
            next(self._steps, None)
        except AnswerEndedError:
            self._ended = True
        return self._deltas.take()
