"""`SpelledMarks` hides the marks that an answer spells in ordinary tokens, where the vocabulary has tokens for them.

Such a mark is a quotation: the model means a mark where it writes the token. Its first character becomes a lone
surrogate, which no text has, so that a parser does not find the mark, and what the parser makes of the text gets the
character back. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from realizar.tokenizer.parsers.cursor import overlap

_SURROGATES = 0xDC00  # of the first 128 characters, as marks begin with one of them
_HIDDEN = re.compile("[\udc00-\udc7f]")


class SpelledMarks:
    """The quoted marks of one answer.

    Args:
        tokens: the marks that the vocabulary has as tokens; others count as they are spelled.
    """

    def __init__(self, tokens: frozenset[str]) -> None:
        self._tokens = sorted(tokens)
        self._pattern = re.compile("|".join(map(re.escape, self._tokens))) if tokens else None
        self._firsts = frozenset(mark[0] for mark in tokens)
        self._held = ""  # it may be the beginning of a mark
        self._held_place: list[int] = []  # 0 if the held text is the beginning of a token's

    def hide(self, text: str, places: Sequence[int]) -> str:
        """Hide the quoted marks of arriving text; what may be the beginning of a mark is held back.

        Args:
            places: where the text of a token begins that is a mark.
        """
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
        """The text that is still held back at the end."""
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
