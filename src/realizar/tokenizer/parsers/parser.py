"""`AnswerParser`: the incremental parser of reasoning, content, and tool calls in one style. Standard library only."""

from __future__ import annotations

import re
from types import MappingProxyType

from realizar.tokenizer.marks import RESPONSE, RESPONSE_END, ReasoningMarks
from realizar.tokenizer.parsers.base import ContentDelta, ReasoningDelta
from realizar.tokenizer.parsers.calls import Schemas
from realizar.tokenizer.parsers.cursor import MismatchError, Reading, overlap, pass_until
from realizar.tokenizer.parsers.incremental import HeldSpace, OutputParser
from realizar.tokenizer.parsers.styles import ToolStyle

# Text that looked like a call is read again as content. Once it is so many characters, no further calls are looked for.
_MAX_REREAD = 256 << 10
_MOST_SAID = 32  # characters: marks are shorter


class AnswerParser(OutputParser):
    """Parses one answer.

    White space around reasoning and calls is not content. All other text becomes content, including text that only
    looked like a call.

    Args:
        reasoning: marks of reasoning at the answer's beginning; None if the model has none.
        reasoning_open: the prompt ends inside reasoning.
        style: style of the calls; None if no tools were given.
        tools, parallel, tokens: as of `OutputParser`.
        in_response: the content may stand between `<response>` and `</response>`, which are not part of it.
        calls_in_reasoning: calls count in reasoning too, as models forget to end it before them. False where a grammar
            has the model end it, as the grammar does not see to such calls.
    """

    def __init__(
        self,
        reasoning: ReasoningMarks | None,
        style: ToolStyle | None,
        tools: Schemas = MappingProxyType({}),
        *,
        reasoning_open: bool = False,
        parallel: bool = True,
        in_response: bool = False,
        calls_in_reasoning: bool = True,
        tokens: frozenset[str] = frozenset(),
    ) -> None:
        new_id = style.new_id if style is not None else str
        super().__init__(tools, new_id, parallel=parallel, tokens=tokens)
        self._space = HeldSpace()  # white space that is content unless a call follows
        self._space_is_calls = False  # nothing but white space came since the last call
        self._has_content = False
        self._num_reread = 0
        self._said = ""  # the last words of content or reasoning, without white space behind them
        self._style, self._reasoning_marks, self._reasoning_open = style, reasoning, reasoning_open
        self._in_response, self._calls_in_reasoning = in_response, calls_in_reasoning
        self.in_reasoning = reasoning is not None and reasoning_open
        self._look_for(())

    def _look_for(self, others: tuple[str, ...]) -> None:
        style = self._style
        self._literals = (*others, *(() if style is None else (*style.marks, *style.line_marks)))
        self._opening = _opening(style, others) if self._literals else None
        self._longest = max(map(len, self._literals), default=0)
        self._firsts = re.compile("|".join(re.escape(literal[0]) for literal in self._literals))

    def _answer(self) -> Reading[None]:
        if self._reasoning_marks is not None:
            yield from self._reasoning(self._reasoning_marks, self._reasoning_open)
        if self._in_response:
            yield from self._response()
        if self._opening is None and self._style is None:
            self._plain()
            return
        yield from self._first_call()
        while (yield from self._content()):
            if self._num_reread > _MAX_REREAD:
                self._plain()
                return
        if not self._space_is_calls:
            self._give_content(self._space.take())

    def _reasoning(self, marks: ReasoningMarks, is_open: bool) -> Reading[None]:
        cursor = self._cursor
        before = yield from cursor.space()
        if not (yield from cursor.optional(marks.start)) and not is_open:
            self._space.hold(before)
            return
        self.in_reasoning = True
        yield from cursor.space()
        space = HeldSpace()
        while True:
            cursor.release()
            ends = self._reasoning_ends(marks)
            found = yield from pass_until(cursor, ends, lambda text: self._give_reasoning(space.before_end(text)))
            if not found:
                self._deltas.text(ReasoningDelta, space.take())
                return
            start = cursor.position
            cursor.position += len(found)
            self.in_reasoning = False
            if found == marks.end:
                yield from cursor.space()
                return
            if (yield from self._calls_behind(found, start)):
                yield from cursor.space()
                # Words behind the calls may still be reasoning, and so may the rest without any.
                if not (yield from cursor.peek()):
                    return
            else:
                self._give_reasoning(space.before_end(found))
            self.in_reasoning = True

    def _reasoning_ends(self, marks: ReasoningMarks) -> tuple[str, ...]:
        if self._style is None or not self._calls_in_reasoning or self._num_reread > _MAX_REREAD:
            return (marks.end,)
        return (marks.end, *self._style.marks)

    def _response(self) -> Reading[None]:
        """Read the mark before the content, if it is there; then the mark after it is looked for too."""
        cursor = self._cursor
        before = yield from cursor.space()
        if not (yield from cursor.optional(RESPONSE)):
            self._space.hold(before)
            return
        self._space.take()
        yield from cursor.space()
        self._look_for((RESPONSE_END,))

    def _plain(self) -> None:
        cursor = self._cursor
        self._give_content(self._space.take() + cursor.text[cursor.position :])
        self._rest_is_content = True

    def _first_call(self) -> Reading[None]:
        """Parse calls whose mark counts only at the beginning of the answer, or of a line."""
        self._space.hold((yield from self._cursor.space()))
        if self._style is None:
            return
        marks = (*self._style.first_marks, *self._style.line_marks)
        start = self._cursor.position
        while mark := (yield from self._cursor.one_of(marks)):
            yield from self._region(mark, start)
            if not self._space_is_calls:
                return
            marks, start = self._style.first_marks, self._cursor.position

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
        cursor = self._cursor
        if mark == RESPONSE_END:
            self._space.take()
            self._look_for(())
            self._space.hold((yield from cursor.space()))
            self._space_is_calls = True
            return
        if not (yield from self._calls_behind(mark, start)):
            self._give_content_before_space(mark)
            return
        space = yield from cursor.space()
        self._space.take()
        if self._has_content:
            self._space.hold(space)
        self._space_is_calls = True

    def _calls_behind(self, mark: str, start: int) -> Reading[bool]:
        """Parse the calls after a mark; False if there are none, and then the text after the mark stays unread."""
        cursor = self._cursor
        if self._style is None or (self._style.marks and self._spelled.quotes(self._said, self._style.marks[0])):
            return False  # a mark right behind a quoted one is quoted too
        cursor.begin(start)
        try:
            yield from self._style.read(cursor, self._calls, mark)
        except MismatchError:
            self._num_reread += cursor.position - cursor.saved
            cursor.position = cursor.saved if cursor.has_saved else start + len(mark)
            return cursor.has_saved
        finally:
            cursor.undecided = False
        return True

    def _give_content_before_space(self, text: str) -> None:
        """Emit content without the white space at its end, which may precede a call."""
        self._give_content(self._space.before_end(text))

    def _give_content(self, text: str) -> None:
        if not text:
            return
        self._has_content, self._space_is_calls = True, False
        self._note_said(text)
        self._deltas.text(ContentDelta, text)

    def _give_reasoning(self, text: str) -> None:
        self._note_said(text)
        self._deltas.text(ReasoningDelta, text)

    def _note_said(self, text: str) -> None:
        if text:
            self._said = (self._said + text[-_MOST_SAID:])[-_MOST_SAID:]


def _opening(style: ToolStyle | None, others: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern of a style's marks and others; of two marks at one place it matches the longer."""
    marks, line_marks = (style.marks, style.line_marks) if style is not None else ((), ())
    anywhere = [re.escape(mark) for mark in sorted((*marks, *others), key=len, reverse=True)]
    at_lines = [f"^{re.escape(mark)}" for mark in sorted(line_marks, key=len, reverse=True)]
    return re.compile("|".join([*anywhere, *at_lines]), re.MULTILINE)
