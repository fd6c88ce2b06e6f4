"""`Detokenizer` converts a stream of token ids to text, a few at a time."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from realizar.tokenizer.tokenizer import TokenBytes


class Detokenizer:
    """The text of a growing list of tokens. The returned texts concatenate to `tokenizer.decode` of all tokens.

    Bytes of an incomplete character are held back until it is complete or invalid.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes_of = token_bytes.__getitem__
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_ids: Iterable[int]) -> str:
        """The text that tokens complete; may be empty."""
        return self._decoder.decode(b"".join(map(self._bytes_of, token_ids)))

    def finish(self) -> str:
        """The text that is still held back: U+FFFD for an incomplete character."""
        return self._decoder.decode(b"", final=True)
