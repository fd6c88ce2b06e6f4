"""`Detokenizer` converts a stream of token ids to text, one at a time."""

from __future__ import annotations

import codecs
from collections.abc import Collection

from realizar.tokenizer.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of a growing list of tokens. The returned texts concatenate to `tokenizer.decode` of all tokens.

    Bytes of an incomplete character are held back until it is complete or invalid.

    Args:
        tokenizer: the model's tokenizer.
        skip_special: leave control tokens out.
        shown: control tokens that are text nevertheless.
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
        """The text that is still held back: U+FFFD for an incomplete character."""
        return self._decoder.decode(b"", True)
