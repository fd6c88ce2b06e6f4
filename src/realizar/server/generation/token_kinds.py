"""`TokenKinds` tells what each token of an answer became: content, reasoning, something else, or no text at all."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from realizar.tokenizer.detokenizer import Detokenizer
from realizar.tokenizer.parsers.base import ContentDelta, ParsedDelta, ReasoningDelta
from realizar.tokenizer.parsers.incremental import OutputParser
from realizar.tokenizer.tokenizer import TokenBytes

TokenKind = Literal["content", "reasoning", "other", "none"]
"""`other` is what a parser takes out: calls, their marks, white space around them. `none` is a control token, or one of
a stop string."""


@dataclass(slots=True)
class _Token:
    """A token. Attributes: text: the characters that it completes. is_text: False for a control token."""

    text: str
    is_text: bool


class TokenKinds:
    """Feeds a parser the text of an answer, token by token, and decides their kinds in their order.

    The marks around reasoning are reasoning, and so are tokens before it whose text was held back as a possible mark.
    Where a token is found to be content, the parts that are returned with it have its text.
    """

    def __init__(self, parser: OutputParser, token_bytes: TokenBytes) -> None:
        self._parser, self._token_bytes = parser, token_bytes
        self._detokenizer = Detokenizer(token_bytes)
        self._coming: deque[_Token] = deque()  # the text of the first is not complete yet
        self._text = ""  # what is there of it
        self._fed: list[_Token] = []  # whose kind is open
        self._marks: list[int] = []  # their places, counted from the text that is fed next

    def feed(
        self, text: str, token_ids: Sequence[int], marks: Sequence[int] = (), *, is_last: bool = False
    ) -> tuple[list[ParsedDelta], list[TokenKind]]:
        """Take in a delta's text and its tokens, whose text may come later; returns what was found out by now.

        `marks` are as of `ChoiceDelta`; `is_last`: tokens whose text has not come are not part of it.
        """
        for token_id in token_ids:
            self._coming.append(_Token(self._detokenizer.add((token_id,)), bool(self._token_bytes[token_id])))
        self._marks.extend(len(self._text) + mark for mark in marks)
        self._text += text
        parsed: list[ParsedDelta] = []
        kinds: list[TokenKind] = []
        while self._coming and len(self._coming[0].text) <= len(self._text):
            token = self._coming.popleft()
            if self._coming:
                size = len(token.text)
                token.text, self._text = self._text[:size], self._text[size:]
            else:
                token.text, self._text = self._text, ""
            gained, found = self._take(token)
            _append(parsed, gained)
            kinds += found
        if is_last and not self._parser.ended:
            rest = [*self._feed(self._text), *self._parser.finish()]
            _append(parsed, rest)
            kinds += self._decided(rest)
            kinds += ["none"] * len(self._coming)
        return parsed, kinds

    def _take(self, token: _Token) -> tuple[list[ParsedDelta], list[TokenKind]]:
        before = self._parser.in_reasoning
        gained = self._feed(token.text)
        self._fed.append(token)
        if before or self._parser.in_reasoning:
            kinds: list[TokenKind] = ["reasoning" if each.is_text else "none" for each in self._fed]
            self._fed.clear()
            return gained, kinds
        return gained, self._decided(gained) if gained else []

    def _feed(self, text: str) -> list[ParsedDelta]:
        marks = [mark for mark in self._marks if mark < len(text)]
        self._marks = [mark - len(text) for mark in self._marks if mark >= len(text)]
        return self._parser.feed(text, marks)

    def _decided(self, gained: Sequence[ParsedDelta]) -> list[TokenKind]:
        """The kinds of the open tokens: content are the last ones, as many as have the text that was gained."""
        kinds: list[TokenKind] = ["other" if token.is_text else "none" for token in self._fed]
        left = sum(len(part.text) for part in gained if isinstance(part, ContentDelta))
        in_content = left > 0
        for place in range(len(self._fed) - 1, -1, -1):
            token = self._fed[place]
            in_content = in_content and (left > 0 or not token.text)  # a character's first tokens have no text
            if in_content and token.is_text:
                kinds[place] = "content"
                left -= len(token.text)
        self._fed.clear()
        return kinds


def _append(parsed: list[ParsedDelta], gained: Sequence[ParsedDelta]) -> None:
    """Add parts; texts of one kind that follow one another become one, as if the parser had read them at once."""
    for part in gained:
        match (parsed[-1] if parsed else None), part:
            case ContentDelta(before), ContentDelta(text):
                parsed[-1] = ContentDelta(before + text)
            case ReasoningDelta(before), ReasoningDelta(text):
                parsed[-1] = ReasoningDelta(before + text)
            case _:
                parsed.append(part)
