"""`GrammarVocabulary`: a model's vocabulary in the form that llguidance expects."""

from __future__ import annotations

from typing import Any

from llguidance import LLTokenizer

from realizar.structured.grammar_tokens import GrammarTokens

# Tokens of a JSON string by their length: where so many characters may follow, all tokens up to that length are allowed
# at once. llguidance's own list has 10 and 30, so that it walks most tokens where less than 10 characters are left.
_STRING = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [*(f"{_STRING}{{1,{most}}}" for most in (1, 2, 3, 5, 8, 12, 20, 30)), f"{_STRING}+"]

_LONGEST_ENCODED = 256  # characters of a forced text that the tokenizer encodes; the rest is encoded greedily


class GrammarVocabulary:
    """The bytes of all tokens, for llguidance's search of the allowed ones.

    `tokens`, `special_token_ids` and `eos_token_id` are names that llguidance reads.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, given: GrammarTokens) -> None:
        vocab_size, ends = given.vocab_size, given.ends
        known = list(given.token_bytes[:vocab_size])
        self.tokens = known + [b""] * (vocab_size - len(known))
        self.special_token_ids = [index for index in {*given.special_ids, *ends} if index < vocab_size]
        self.eos_token_id = ends[0]
        self._encode = given.encode
        wrapper: Any = self
        self.lltokenizer = LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=list(ends), slices=_SLICES)

    def __call__(self, text: str) -> list[int]:
        """Encode a text to ids with exactly its bytes."""
        head = text[:_LONGEST_ENCODED]
        ids = self._encoded(head)
        if ids is None:
            return list(self.lltokenizer.greedy_tokenize(text))
        rest = text[_LONGEST_ENCODED:]
        return [*ids, *self.lltokenizer.greedy_tokenize(rest)] if rest else ids

    def _encoded(self, text: str) -> list[int] | None:
        """The tokenizer's ids of a text, without an added space before it; None if they don't spell the text."""
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
