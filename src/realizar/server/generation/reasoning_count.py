"""`ReasoningCount` counts the tokens of an answer that belong to its reasoning."""

from __future__ import annotations

from collections.abc import Sequence

from realizar.tokenizer.parsers.base import OutputParser, ParsedDelta
from realizar.tokenizer.tokenizer import TokenBytes


class ReasoningCount:
    """Feeds a parser the text of an answer, token by token, and counts the tokens of reasoning.

    The marks around reasoning count, and so do tokens before it whose text was held back as a possible mark.

    Args:
        token_bytes: the bytes of each token in the answer's text.
    """

    def __init__(self, parser: OutputParser, token_bytes: TokenBytes) -> None:
        self._parser, self._token_bytes = parser, token_bytes
        self._held = 0  # tokens that gave nothing yet
        self._ahead = 0  # bytes of tokens whose characters are not part of the text yet

    def feed(self, text: str, token_ids: Sequence[int]) -> tuple[list[ParsedDelta], int]:
        """Take in a delta's text and its tokens; returns what the parser found, and tokens found to be reasoning."""
        if not token_ids:
            return self._parser.feed(text), 0
        parsed: list[ParsedDelta] = []
        num_reasoning = 0
        for part in self._cut(text, token_ids):
            before = self._parser.in_reasoning
            gained = self._parser.feed(part)
            parsed += gained
            if before or self._parser.in_reasoning:
                num_reasoning += self._held + 1
                self._held = 0
            else:
                self._held = 0 if gained else self._held + 1
        return parsed, num_reasoning

    def _cut(self, text: str, token_ids: Sequence[int]) -> list[str]:
        """The characters that each token completed; the last one has the rest."""
        data = text.encode()
        parts: list[str] = []
        place, end = 0, self._ahead
        for token_id in token_ids[:-1]:
            end += len(self._token_bytes[token_id])
            part = data[place : max(end, place)].decode(errors="ignore")  # a character may be cut: the next one has it
            parts.append(part)
            place += len(part.encode())
        self._ahead = max(end + len(self._token_bytes[token_ids[-1]]) - len(data), 0)
        return [*parts, data[place:].decode()]
