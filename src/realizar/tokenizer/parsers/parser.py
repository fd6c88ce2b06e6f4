"""`AnswerParser`: the incremental parser of reasoning, content, and tool calls in one style. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from realizar.tokenizer.marks import ReasoningMarks
from realizar.tokenizer.parsers.cursor import MismatchError, Reading, overlap
from realizar.tokenizer.parsers.deltas import HeldSpace
from realizar.tokenizer.parsers.incremental import IncrementalParser
from realizar.tokenizer.parsers.styles import ToolStyle

# Text that looked like a call is read again as content. Once it is so many characters, no further calls are looked for.
_MAX_REREAD = 256 << 10


class AnswerParser(IncrementalParser):
    """Parses one answer; an `OutputParser`.

    White space around reasoning and calls is not content. All other text becomes content, including text that only
    looked like a call.

    Args:
        reasoning: marks of reasoning at the answer's beginning; None if the model has none.
        reasoning_open: True if the prompt ends inside reasoning.
        style: style of the calls; None if no tools were given.
        tools: the parameters' JSON schema of each tool, by name.
        parallel: True if several calls are allowed; otherwise the answer ends with the first.
    """

    def __init__(
        self,
        reasoning: ReasoningMarks | None,
        style: ToolStyle | None,
        tools: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        *,
        reasoning_open: bool = False,
        parallel: bool = True,
    ) -> None:
        new_id = style.new_id if style is not None else str
        super().__init__(tools, new_id, parallel=parallel)
        self._space = HeldSpace()  # white space that is content unless a call follows
        self._space_is_calls = False  # nothing but white space came since the last call
        self._has_content = False
        self._num_reread = 0
        self._style, self._reasoning_marks, self._reasoning_open = style, reasoning, reasoning_open
        self._opening = None if style is None else _opening(style)
        self._literals: Sequence[str] = () if style is None else (*style.marks, *style.line_marks)
        self._longest = max(map(len, self._literals), default=0)
        self._firsts = re.compile("|".join(re.escape(literal[0]) for literal in self._literals))

    def _answer(self) -> Reading[None]:
        if self._reasoning_marks is not None:
            yield from self._reasoning(self._reasoning_marks, self._reasoning_open)
        if self._opening is None:
            yield from self._plain()
            return
        yield from self._first_call()
        while (yield from self._content()):
            if self._num_reread > _MAX_REREAD:
                yield from self._plain()
                return
        if not self._space_is_calls:
            self._give_content(self._space.take())

    def _reasoning(self, marks: ReasoningMarks, is_open: bool) -> Reading[None]:
        cursor = self._cursor
        before = yield from cursor.space()
        if not (yield from cursor.optional(marks.start)) and not is_open:
            self._space.hold(before)
            return
        yield from cursor.space()
        space = HeldSpace()
        while True:
            found = cursor.text.find(marks.end, cursor.position)
            end = found if found >= 0 else len(cursor.text) - overlap(cursor.text, (marks.end,), cursor.position)
            self._deltas.reasoning(space.before_end(cursor.text[cursor.position : end]))
            cursor.position = end
            if found >= 0:
                cursor.position += len(marks.end)
                yield from cursor.space()
                return
            cursor.drop()
            if not (yield from cursor.more()):
                self._deltas.reasoning(space.take() + cursor.text[cursor.position :])
                cursor.position = len(cursor.text)
                return

    def _plain(self) -> Reading[None]:
        """Treat the rest as content, which `feed` returns as it arrives."""
        cursor = self._cursor
        self._give_content(self._space.take() + cursor.text[cursor.position :])
        self._rest_is_content = True
        yield from ()

    def _first_call(self) -> Reading[None]:
        """Parse a call whose mark counts only at the beginning of the answer or of a line."""
        self._space.hold((yield from self._cursor.space()))
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
            cursor.release()
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
        if self._style is None:
            return
        cursor.begin(start)
        try:
            yield from self._style.read(cursor, self._calls, mark)
        except MismatchError:
            self._num_reread += cursor.position - cursor.saved
            cursor.undecided = False
            if not cursor.has_saved:
                cursor.position = start + len(mark)
                self._give_content_before_space(mark)
                return
            cursor.position = cursor.saved
        cursor.undecided = False
        space = yield from cursor.space()
        self._space.take()
        if self._has_content:
            self._space.hold(space)
        self._space_is_calls = True

    def _give_content_before_space(self, text: str) -> None:
        """Emit content without the white space at its end, which may precede a call."""
        self._give_content(self._space.before_end(text))

    def _give_content(self, text: str) -> None:
        if not text:
            return
        self._has_content, self._space_is_calls = True, False
        self._deltas.content(text)


def _opening(style: ToolStyle) -> re.Pattern[str]:
    """A pattern of a style's marks; of two marks at one place it matches the longer."""
    anywhere = [re.escape(mark) for mark in sorted(style.marks, key=len, reverse=True)]
    at_lines = [f"^{re.escape(mark)}" for mark in sorted(style.line_marks, key=len, reverse=True)]
    return re.compile("|".join([*anywhere, *at_lines]), re.MULTILINE)
