"""`HarmonyParser`: answers as messages in channels, which gpt-oss writes. Standard library only.

A message is `<|start|>assistant<|channel|>analysis<|message|>text<|end|>`; the prompt ends behind `assistant`.
`analysis` is reasoning, `final` is content, and `commentary` too unless it goes to a function: then it is a call.
Format: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import functools
import re

from realizar.tokenizer.marks import (
    HARMONY_CALL,
    HARMONY_CHANNEL,
    HARMONY_CONSTRAIN,
    HARMONY_END,
    HARMONY_MESSAGE,
    HARMONY_RETURN,
    HARMONY_START,
)
from realizar.tokenizer.parsers.base import ContentDelta, ReasoningDelta
from realizar.tokenizer.parsers.calls import Calls, Schemas, read_arguments
from realizar.tokenizer.parsers.cursor import Cursor, Give, MismatchError, Reading, pass_until
from realizar.tokenizer.parsers.incremental import OutputParser
from realizar.tokenizer.parsers.styles import CallForm, ToolStyle, long_id

_ROLE = "assistant"
_HEADER_LIMIT = 256
_ENDS = (HARMONY_END, HARMONY_RETURN, HARMONY_CALL)
_BODY_ENDS = (*_ENDS, HARMONY_START, HARMONY_CHANNEL)  # the last two begin another message
_HEADER_END = re.compile("|".join(map(re.escape, (HARMONY_MESSAGE, *_ENDS, HARMONY_START))))
_CHANNEL = re.compile(rf"{re.escape(HARMONY_CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
# What a whole header looks like where the answer ends before its message.
_HEADER = re.compile(
    r"(assistant)?( ?to=[^\s<]*)?(<\|channel\|>\w*( to=[^\s<]*)?)?( ?<\|constrain\|>)?( ?\w*)( ?<?\|?\w*)"
)
_HEADER_STARTS = (
    HARMONY_START,
    HARMONY_CHANNEL,
    HARMONY_MESSAGE,
    " to=",
    "to=",
    f"{_ROLE}{HARMONY_CHANNEL}",  # models forget the mark before it
    f"{_ROLE} to=",
)
_NO_TOOLS = ("assistant", "user", "all")
_GAP = "\n\n"  # between two messages of one kind


def _read_nothing(cursor: Cursor, calls: Calls, mark: str) -> Reading[None]:
    """The style has no marks of its own: calls are messages, which `HarmonyParser` parses."""
    yield from ()


class HarmonyParser(OutputParser):
    """Parses one answer.

    Messages that are malformed, of another role or to an unknown function become content as they were written. For
    `prompt_end` see `choose_parser`; a message may begin there. For the rest see `OutputParser`.
    """

    def __init__(
        self, tools: Schemas, prompt_end: str = "", *, parallel: bool = True, tokens: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(tools, long_id, parallel=parallel, tokens=tokens)
        self._tools = tools
        self._given = set[type[ContentDelta | ReasoningDelta]]()
        self._give_content = functools.partial(self._give, ContentDelta)
        self._is_new = False  # nothing of this message has been given yet
        _, found, begun = prompt_end.rpartition(f"{HARMONY_START}{_ROLE}")
        if found and HARMONY_END not in begun:
            self._cursor.append(begun)

    def _answer(self) -> Reading[None]:
        cursor = self._cursor
        while (yield from cursor.peek()):
            cursor.release()
            start = yield from cursor.one_of(_HEADER_STARTS)
            cursor.position -= len(start)
            if start:
                self._is_new = True
                yield from self._message()
            else:
                yield from self._body(self._give_content)

    def _message(self) -> Reading[None]:
        cursor = self._cursor
        cursor.begin(cursor.position)
        started = yield from cursor.optional(HARMONY_START)
        header, mark = yield from self._header()
        end = cursor.position + len(header)
        if not mark and cursor.ended and end == len(cursor.text) and _HEADER.fullmatch(header):
            cursor.position = end  # the answer ended before the message began
            return
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = "" if recipient is None else recipient[1].removeprefix("functions.")
        cursor.undecided = False
        if mark != HARMONY_MESSAGE or (started and not header.startswith(_ROLE)):
            yield from self._as_written()
        elif name in self._tools:
            yield from self._call(name)
        elif channel is not None and channel[1] == "analysis":
            self.in_reasoning = True
            yield from self._body(functools.partial(self._give, ReasoningDelta))
            self.in_reasoning = False
        elif not name or name in _NO_TOOLS:
            yield from self._body(self._give_content)
        else:
            yield from self._as_written()

    def _header(self) -> Reading[tuple[str, str]]:
        """Read a header and the mark after it; without a mark the position stays."""
        cursor = self._cursor
        limit = _HEADER_LIMIT + len(HARMONY_MESSAGE)
        while True:
            found = _HEADER_END.search(cursor.text, cursor.position, cursor.position + limit)
            if found is not None:
                header = cursor.text[cursor.position : found.start()]
                cursor.position = found.end()
                return header, found.group()
            if len(cursor.text) - cursor.position >= limit:
                return cursor.text[cursor.position : cursor.position + limit], ""
            if not (yield from cursor.more()):
                return cursor.text[cursor.position :], ""

    def _as_written(self) -> Reading[None]:
        """Pass a message on as it was written, with its marks, as content."""
        cursor = self._cursor
        cursor.position = cursor.saved
        mark = next(start for start in _HEADER_STARTS if cursor.text.startswith(start, cursor.position))
        has_channel = False
        while True:
            self._give_content(mark)
            cursor.position += len(mark)
            if mark in _ENDS:
                return
            has_channel = has_channel or mark == HARMONY_MESSAGE or HARMONY_CHANNEL in mark
            mark = yield from pass_until(cursor, (*_BODY_ENDS, HARMONY_MESSAGE), self._give_content)
            if not mark or mark == HARMONY_START or (mark == HARMONY_CHANNEL and has_channel):
                return

    def _body(self, give: Give) -> Reading[None]:
        cursor = self._cursor
        mark = yield from pass_until(cursor, _BODY_ENDS, give)
        if mark in _ENDS:
            cursor.position += len(mark)

    def _call(self, name: str) -> Reading[None]:
        cursor = self._cursor
        cursor.undecided = True
        try:
            yield from cursor.space()
            if not (yield from cursor.peek()) or (yield from cursor.one_of(_ENDS)):
                self._calls.open(name)
                self._calls.give("{}")
                self._calls.close()
                cursor.undecided = False
                return
            yield from read_arguments(cursor, self._calls, name, _BODY_ENDS)
        except MismatchError:
            cursor.undecided = False
            yield from self._as_written()
            return
        cursor.undecided = False
        yield from cursor.space()
        yield from self._body(self._give_content)

    def _give(self, kind: type[ContentDelta | ReasoningDelta], text: str) -> None:
        if text:
            self._deltas.text(kind, _GAP + text if self._is_new and kind in self._given else text)
            self._is_new = False
            self._given.add(kind)


HARMONY = ToolStyle(
    "harmony",
    _read_nothing,
    CallForm(f"{HARMONY_CHANNEL}commentary to=functions.", f" {HARMONY_CONSTRAIN}json{HARMONY_MESSAGE}", ""),
)
