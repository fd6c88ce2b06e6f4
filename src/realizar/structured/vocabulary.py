"""A model's vocabulary as llguidance wants it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from llguidance import LLTokenizer

_LONGEST_ENCODED = 256  # characters of a forced text that are cut as the tokenizer would: the rest is cut greedily

Encode = Callable[[str], Sequence[int] | None]


class GrammarVocabulary:
    """Bytes of all tokens, sorted for the walk that finds which of them a grammar allows.

    Args:
        token_bytes: what each id adds to the text.
        special_ids: control tokens; they are no text, whatever their bytes are.
        end_ids: ids that end an answer, at least one.
        vocab_size: logits per row; ids from `len(token_bytes)` on are never allowed.
        encode: text to ids, where known. Text that a grammar leaves no choice about is cut into tokens by it; without
            it the longest token at each place is taken.
    """

    # The names that llguidance reads.
    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_ids: Collection[int],
        end_ids: Collection[int],
        vocab_size: int,
        encode: Encode | None = None,
    ) -> None:
        known = list(token_bytes[:vocab_size])
        self.tokens = known + [b""] * (vocab_size - len(known))
        self.special_token_ids = [index for index in {*special_ids, *end_ids} if index < vocab_size]
        self.eos_token_id = min(end_ids)
        self._encode = encode
        wrapper: Any = self
        self.lltokenizer = LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=sorted(end_ids))

    def __call__(self, text: str) -> list[int]:
        """Ids whose bytes are those of a text."""
        head = text[:_LONGEST_ENCODED]
        ids = self._encoded(head)
        if ids is None:
            return list(self.lltokenizer.greedy_tokenize(text))
        rest = text[_LONGEST_ENCODED:]
        return [*ids, *self.lltokenizer.greedy_tokenize(rest)] if rest else ids

    def _encoded(self, text: str) -> list[int] | None:
        """Ids of a text, without the space that the tokenizer may put before it; None where they don't spell it."""
        if self._encode is None:
            return None
        encoded = self._encode(text)
        if encoded is None:
            return None
        ids, wanted = list(encoded), text.encode()
        if any(index >= len(self.tokens) for index in ids):
            return None
        if ids and self.tokens[ids[0]] == b" " and not wanted.startswith(b" "):
            del ids[0]
        return ids if b"".join(self.tokens[index] for index in ids) == wanted else None
