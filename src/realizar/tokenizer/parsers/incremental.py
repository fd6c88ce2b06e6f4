"""`OutputParser`: what every parser of answers shares. A subclass writes its steps. Standard library only."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from realizar.tokenizer.parsers.base import ContentDelta, ParsedDelta, ReasoningDelta, ToolCallDelta
from realizar.tokenizer.parsers.calls import AnswerEndedError, Calls, Schemas
from realizar.tokenizer.parsers.cursor import Cursor, Reading, overlap

# `DeltaList` joins neighbouring deltas of a parser, and `HeldSpace` holds white space back.

SPACE = " \t\r\n"


class DeltaList:
    """Deltas in order; texts of one kind that follow each other become one delta, in time linear in their length.

    `show` makes a parsed text what the model wrote.
    """

    def __init__(self, show: Callable[[str], str]) -> None:
        self._show = show
        self._groups: list[tuple[ParsedDelta, list[str]]] = []  # the first of neighbours, and all their texts

    def text(self, kind: type[ContentDelta | ReasoningDelta], text: str) -> None:
        if text:
            if not self._groups or not isinstance(self._groups[-1][0], kind):
                self._groups.append((kind(""), []))
            self._groups[-1][1].append(text)

    def call(self, delta: ToolCallDelta) -> None:
        last = self._groups[-1][0] if self._groups else None
        if not isinstance(last, ToolCallDelta) or last.index != delta.index:
            self._groups.append((delta, []))
        self._groups[-1][1].append(delta.arguments)

    def take(self) -> list[ParsedDelta]:
        groups, self._groups = self._groups, []
        return [self._joined(first, self._show("".join(texts))) for first, texts in groups]

    def _joined(self, first: ParsedDelta, text: str) -> ParsedDelta:
        return replace(first, arguments=text) if isinstance(first, ToolCallDelta) else replace(first, text=text)


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
        if not self._pieces:
            return ""
        held, self._pieces = "".join(self._pieces), []
        return held

    def hold(self, space: str) -> None:
        self._pieces.append(space)


class OutputParser(ABC):
    """Parses an answer's text as it arrives. The deltas concatenate to the same result however the text is cut.

    The text comes from `StopChecker`, which spells out the control tokens that mark calls and reasoning. A subclass
    writes the steps.

    Args:
        tools: the parameters' JSON schema of each tool, by name.
        parallel: several calls are allowed; otherwise the answer ends with the first.
        tokens: marks that the vocabulary has as tokens: they count at the places alone that `feed` is told of.

    Attributes:
        ended: the only allowed call is complete. Further text is ignored, so generation may stop.
        in_reasoning: the text that was fed ends inside reasoning, whose marks count as reasoning.
    """

    def __init__(
        self, tools: Schemas, new_id: Callable[[], str], *, parallel: bool = True, tokens: frozenset[str] = frozenset()
    ) -> None:
        self._spelled = _SpelledMarks(tokens)
        self._cursor = Cursor(tokens)
        self._deltas = DeltaList(self._spelled.show)
        self._calls = Calls(tools, new_id, self._deltas.call, self._spelled.show, parallel=parallel)
        self.ended = self._rest_is_content = self.in_reasoning = False
        self._steps = self._answer()

    @abstractmethod
    def _answer(self) -> Reading[None]:
        """Parse the answer; called once, and run as text arrives."""

    @property
    def num_calls(self) -> int:
        """The number of tool calls so far; above 0 the finish reason `stop` becomes `tool_calls`."""
        return self._calls.count

    def feed(self, text: str, marks: Sequence[int] = ()) -> list[ParsedDelta]:
        """Take in text and return the certain deltas; a possible beginning of a mark or a call is held back.

        Args:
            marks: where in the text tokens begin that are marks, as of `ChoiceDelta`.
        """
        return self._take(self._spelled.hide(text, marks))

    def finish(self) -> list[ParsedDelta]:
        """Return the deltas that are still held back; nothing may be fed afterwards."""
        if self.ended or self._cursor.ended:
            return []
        rest = self._take(self._spelled.finish())
        self._cursor.ended = True
        return [*rest, *self._go_on()]

    def _take(self, text: str) -> list[ParsedDelta]:
        if not text or self.ended:
            return []
        if self._rest_is_content:
            return [ContentDelta(self._spelled.show(text))]
        self._cursor.append(text)
        return self._go_on()

    def _go_on(self) -> list[ParsedDelta]:
        try:
            next(self._steps, None)
        except AnswerEndedError:
            self.ended = True
        return self._deltas.take()


# `_SpelledMarks` hides the marks that an answer spells in ordinary tokens, where the vocabulary has tokens for them.
#
# Such a mark is a quotation: the model means a mark where it writes the token. Its first character becomes a lone
# surrogate, which no text has, so that a parser does not find the mark, and what the parser makes of the text gets
# the character back.

_SURROGATES = 0xDC00  # of the first 128 characters, as marks begin with one of them
_HIDDEN = re.compile("[\udc00-\udc7f]")


class _SpelledMarks:
    """The quoted marks of one answer; marks that are no tokens count as they are spelled."""

    def __init__(self, tokens: frozenset[str]) -> None:
        self._tokens = sorted(tokens)
        self._pattern = re.compile("|".join(map(re.escape, self._tokens))) if tokens else None
        self._firsts = frozenset(mark[0] for mark in tokens)
        self._held = ""  # it may be the beginning of a mark
        self._held_place: list[int] = []  # 0 if the held text is the beginning of a token's

    def hide(self, text: str, places: Sequence[int]) -> str:
        """Hide the quoted marks of arriving text; beginnings are held back. `places`: of tokens that are marks."""
        if self._pattern is None:
            return text
        if not self._held and not places and self._firsts.isdisjoint(text):
            return text
        places = [*self._held_place, *(len(self._held) + place for place in places)]
        text, self._held, self._held_place = self._held + text, "", []
        pieces: list[str] = []
        start = 0
        for place in places:
            pieces.append(self._pattern.sub(_hidden, text[start:place]))
            found = self._pattern.match(text, place)
            if found is None:  # the rest of the token's text is still to come
                self._held, self._held_place = text[place:], [0]
                return "".join(pieces)
            pieces.append(found.group())
            start = found.end()
        quoted = self._pattern.sub(_hidden, text[start:])
        end = len(quoted) - overlap(quoted, self._tokens)
        self._held = quoted[end:]
        return "".join([*pieces, quoted[:end]])

    def quotes(self, text: str, mark: str) -> bool:
        """True if a text ends with a quoted mark."""
        return mark in self._tokens and text.endswith(chr(_SURROGATES + ord(mark[0])) + mark[1:])

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def show(self, text: str) -> str:
        """A text with its quoted marks as they were written."""
        return text if self._pattern is None or text.isascii() else _HIDDEN.sub(_shown, text)


def _hidden(found: re.Match[str]) -> str:
    mark = found.group()
    return chr(_SURROGATES + ord(mark[0])) + mark[1:]


def _shown(found: re.Match[str]) -> str:
    return chr(ord(found.group()) - _SURROGATES)
