"""`AnswerParser`: the incremental parser of reasoning, content, and tool calls in one style. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from realizar.tokenizer.marks import ReasoningMarks
from realizar.tokenizer.parsers.base import ContentDelta, ParsedDelta, ReasoningDelta, ToolCallDelta
from realizar.tokenizer.parsers.calls import AnswerEndedError, Calls
from realizar.tokenizer.parsers.cursor import Cursor, MismatchError, Reading, overlap
from realizar.tokenizer.parsers.styles import ToolStyle

_SPACE = " \t\r\n"


class AnswerParser:
    """Parses one answer; an `OutputParser`.

    White space around reasoning and calls is not content. All other text becomes content, including text that only
    looked like a call.

    Args:
        reasoning: marks of reasoning at the answer's beginning; None if the model has none.
        reasoning_open: True if the prompt ends inside reasoning.
        style: style of the calls; None if no tools were given.
        names: names of the tools.
        parallel: True if several calls are allowed; otherwise the answer ends with the first.
    """

    def __init__(
        self,
        reasoning: ReasoningMarks | None,
        style: ToolStyle | None,
        names: Collection[str] = (),
        *,
        reasoning_open: bool = False,
        parallel: bool = True,
    ) -> None:
        self._cursor = Cursor()
        self._deltas: list[ParsedDelta] = []
        self._space = ""  # white space that is content unless a call follows
        self._space_is_calls = False  # nothing but white space came since the last call
        self._has_content = False
        self._ended = self._rest_is_content = False
        self._style = style
        new_id = style.new_id if style is not None else str
        self._calls = Calls(names, new_id, self._give_call, parallel=parallel)
        self._opening = None if style is None else _opening(style)
        self._literals: Sequence[str] = () if style is None else (*style.marks, *style.line_marks)
        self._longest = max(map(len, self._literals), default=0)
        self._firsts = re.compile("|".join(re.escape(literal[0]) for literal in self._literals))
        self._steps = self._answer(reasoning, reasoning_open)

    @property
    def ended(self) -> bool:
        """True once the only allowed call is complete; further text is ignored."""
        return self._ended

    @property
    def num_calls(self) -> int:
        """The number of calls so far."""
        return self._calls.count

    def feed(self, text: str) -> list[ParsedDelta]:
        """Take in text and return the certain deltas."""
        if not text or self._ended:
            return []
        if self._rest_is_content:
            return [ContentDelta(text)]
        self._cursor.append(text)
        return self._go_on()

    def finish(self) -> list[ParsedDelta]:
        """Return the deltas that are still held back; nothing may be fed afterwards."""
        if self._ended or self._cursor.ended:
            return []
        self._cursor.ended = True
        return self._go_on()

    def _go_on(self) -> list[ParsedDelta]:
        try:
            next(self._steps, None)
        except AnswerEndedError:
            self._ended = True
        deltas, self._deltas = self._deltas, []
        return deltas

    def _answer(self, reasoning: ReasoningMarks | None, reasoning_open: bool) -> Reading[None]:
        if reasoning is not None:
            yield from self._reasoning(reasoning, reasoning_open)
        if self._opening is None:
            yield from self._plain()
            return
        yield from self._first_call()
        while (yield from self._content()):
            pass
        if not self._space_is_calls:
            self._give_content(self._space)

    def _reasoning(self, marks: ReasoningMarks, is_open: bool) -> Reading[None]:
        cursor = self._cursor
        before = yield from cursor.space()
        if not (yield from cursor.optional(marks.start)) and not is_open:
            self._space = before
            return
        yield from cursor.space()
        space = ""
        while True:
            found = cursor.text.find(marks.end, cursor.position)
            end = found if found >= 0 else len(cursor.text) - overlap(cursor.text, (marks.end,), cursor.position)
            text = space + cursor.text[cursor.position : end]
            cursor.position = end
            shown = text.rstrip(_SPACE)
            space = text[len(shown) :]
            self._give_reasoning(shown)
            if found >= 0:
                cursor.position += len(marks.end)
                yield from cursor.space()
                return
            cursor.drop()
            if not (yield from cursor.more()):
                self._give_reasoning(space + cursor.text[cursor.position :])
                cursor.position = len(cursor.text)
                return

    def _plain(self) -> Reading[None]:
        """Treat the rest as content, which `feed` returns as it arrives."""
        cursor = self._cursor
        self._give_content(self._space + cursor.text[cursor.position :])
        self._rest_is_content = True
        yield from ()

    def _first_call(self) -> Reading[None]:
        """Parse a call whose mark counts only at the beginning of the answer or of a line."""
        space = yield from self._cursor.space()
        self._space += space
        if self._style is None:
            return
        start = self._cursor.position
        mark = yield from self._cursor.one_of((*self._style.first_marks, *self._style.line_marks))
        if mark:
            yield from self._region(mark, start)

    def _content(self) -> Reading[bool]:
        """Parse content up to a mark, and the calls after it; False at the end."""
        cursor = self._cursor
        while True:
            found = None if self._opening is None else self._opening.search(cursor.text, cursor.position)
            sure = len(cursor.text)
            if self._firsts.search(cursor.text, max(sure - self._longest, cursor.position)):
                sure -= overlap(cursor.text, self._literals, cursor.position)
            if found is not None and found.end() <= sure:
                self._give_content_before_space(cursor.text[cursor.position : found.start()])
                cursor.position = found.end()
                yield from self._region(found.group(), found.start())
                return True
            if found is not None:
                sure = min(sure, found.start())
            self._give_content_before_space(cursor.text[cursor.position : sure])
            cursor.position = sure
            cursor.drop()
            if not (yield from cursor.more()):
                self._give_content_before_space(cursor.text[cursor.position :])
                cursor.position = len(cursor.text)
                return False

    def _region(self, mark: str, start: int) -> Reading[None]:
        """Parse the text after a mark: calls, or content that looked like a call."""
        cursor = self._cursor
        cursor.saved = start
        if self._style is None:
            return
        try:
            yield from self._style.read(cursor, self._calls, mark)
        except MismatchError:
            if cursor.saved == start:
                cursor.position = start + len(mark)
                self._give_content_before_space(mark)
                return
            cursor.position = cursor.saved
        space = yield from cursor.space()
        self._space = space if self._has_content else ""
        self._space_is_calls = True

    def _give_content_before_space(self, text: str) -> None:
        """Emit content without the white space at its end, which may precede a call."""
        text = self._space + text
        shown = text.rstrip(_SPACE)
        self._space = text[len(shown) :]
        self._give_content(shown)

    def _give_content(self, text: str) -> None:
        if not text:
            return
        self._has_content, self._space_is_calls = True, False
        last = self._deltas[-1] if self._deltas else None
        if isinstance(last, ContentDelta):
            self._deltas[-1] = ContentDelta(last.text + text)
        else:
            self._deltas.append(ContentDelta(text))

    def _give_reasoning(self, text: str) -> None:
        if not text:
            return
        last = self._deltas[-1] if self._deltas else None
        if isinstance(last, ReasoningDelta):
            self._deltas[-1] = ReasoningDelta(last.text + text)
        else:
            self._deltas.append(ReasoningDelta(text))

    def _give_call(self, delta: ToolCallDelta) -> None:
        self._space = ""
        last = self._deltas[-1] if self._deltas else None
        if isinstance(last, ToolCallDelta) and last.index == delta.index:
            self._deltas[-1] = replace(last, arguments=last.arguments + delta.arguments)
        else:
            self._deltas.append(delta)


def _opening(style: ToolStyle) -> re.Pattern[str]:
    """A pattern of a style's marks; of two marks at one place it matches the longer."""
    anywhere = [re.escape(mark) for mark in sorted(style.marks, key=len, reverse=True)]
    at_lines = [f"^{re.escape(mark)}" for mark in sorted(style.line_marks, key=len, reverse=True)]
    return re.compile("|".join([*anywhere, *at_lines]), re.MULTILINE)
