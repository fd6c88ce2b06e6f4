"""Token ids to text, one at a time, for a stream."""

from __future__ import annotations

import codecs
from collections.abc import Collection

from realizar.tokenizer.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Text of a growing list of tokens. What it gives concatenates to `tokenizer.decode` of all of them.

    Bytes that may yet become a character are held back until they do, or can't.

    Args:
        tokenizer: of the model.
        skip_special: whether control tokens are left out.
        shown: control tokens that are text all the same.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True, shown: Collection[int] = ()) -> None:
        self._tokenizer, self._skip_special, self._shown = tokenizer, skip_special, frozenset(shown)
        self._decoder = _UTF8("replace")

    def add(self, token_id: int) -> str:
        """The text that a token completes; may be empty."""
        if self._skip_special and token_id not in self._shown and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is still held back: U+FFFD for a character cut short."""
        return self._decoder.decode(b"", True)
