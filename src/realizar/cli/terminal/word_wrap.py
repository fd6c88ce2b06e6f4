"""`WordWrapper` breaks the lines of streamed text between words instead of within them. Standard library only."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

_TAB = 8
_FENCE = "```"


class WordWrapper:
    """Adds line breaks to streamed text before words that would not fit.

    A word is held back until it ends or is as long as a line, so the output lags by less than a word. Lines of fenced
    code stay as they are, so that they can be copied. Lines may break between any wide characters (Chinese, Japanese,
    Korean).

    Args:
        width: returns the columns of the terminal; called for each word, since windows are resized.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._column = 0
        self._word = ""
        self._word_columns = 0
        self._line_start = ""
        self._in_code = self._in_long_word = False

    def feed(self, text: str) -> str:
        """Take in text and return the text that can be shown now."""
        return "".join(self._take(char) for char in text)

    def flush(self) -> str:
        """Return the held-back word at the end of the text."""
        return self._end_word()

    def _take(self, char: str) -> str:
        if len(self._line_start) < len(_FENCE) and char != "\n":
            self._line_start += char
        if char == "\n":
            shown = self._end_word() + char
            self._in_code ^= self._line_start == _FENCE
            self._column, self._line_start = 0, ""
            return shown
        if self._in_code:
            return char
        if char in " \t":
            shown = self._end_word()
            columns = 1 if char == " " else _TAB - self._column % _TAB
            if self._column + columns > self._width():
                return shown  # a blank at the margin would begin the next line
            self._column += columns
            return shown + char
        columns = _columns(char)
        if columns == 2:
            return self._end_word() + self._place(char, columns)
        self._word += char
        self._word_columns += columns
        if self._word_columns < self._width():
            return ""
        shown = self._place_word()  # as long as a line: the terminal breaks the rest of it
        self._in_long_word = True
        return shown

    def _end_word(self) -> str:
        shown = self._place_word()
        self._in_long_word = False
        return shown

    def _place_word(self) -> str:
        word, columns = self._word, self._word_columns
        self._word, self._word_columns = "", 0
        return self._place(word, columns) if word else ""

    def _place(self, text: str, columns: int) -> str:
        width = self._width()
        before = "\n" if self._column > 0 and self._column + columns > width and not self._in_long_word else ""
        self._column = (0 if before else self._column) + columns
        if self._column > width:
            self._column = (self._column - 1) % width + 1
        return before + text


def _columns(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
