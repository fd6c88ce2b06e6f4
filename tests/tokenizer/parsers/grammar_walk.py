"""Grammars over a vocabulary of bytes, for the tests of grammars that force calls."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from realizar.sampling_params import StructuredOutput
from realizar.structured.grammar import grammar_text


@dataclass
class ByteVocabulary:
    """A vocabulary of the bytes, some control tokens, and an end."""

    special: Sequence[str]

    def __post_init__(self) -> None:
        names = [*self.special, "<end>"]
        self.tokens = [*(bytes([value]) for value in range(256)), *(b"\xff" + name.encode() for name in names)]
        self.special_token_ids = list(range(256, len(self.tokens)))
        self.eos_token_id = len(self.tokens) - 1
        self.bos_token_id = self.unk_token_id = None
        self.ids = {text: 256 + index for index, text in enumerate(self.special)}
        self.compiled: dict[StructuredOutput, LLMatcher] = {}

    @cached_property
    def trie(self) -> LLTokenizer:
        return LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.tokens))

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def encode(self, text: str) -> list[int]:
        """Control tokens whole, the rest as bytes."""
        parts = re.split("(" + "|".join(map(re.escape, self.special)) + ")", text) if self.special else [text]
        return [i for part in parts for i in ([self.ids[part]] if part in self.ids else part.encode())]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.tokens[i].removeprefix(b"\xff") for i in ids).decode()


def matcher(grammar: StructuredOutput | None, vocabulary: ByteVocabulary) -> LLMatcher:
    """At the start of a grammar, which is compiled once for a vocabulary."""
    assert grammar is not None
    if (made := vocabulary.compiled.get(grammar)) is None:
        made = LLMatcher(vocabulary.trie, grammar_text(grammar), log_level=0)
        assert not made.is_error(), (made.get_error(), grammar.value)
        vocabulary.compiled[grammar] = made
    return made.deep_copy()


def allows(grammar: StructuredOutput | None, vocabulary: ByteVocabulary, text: str) -> bool:
    """True if a text is a complete answer of a grammar."""
    match = matcher(grammar, vocabulary)
    return all(match.consume_token(i) for i in vocabulary.encode(text)) and match.is_accepting()


def walk(match: LLMatcher, vocabulary: ByteVocabulary, rng: random.Random, closing: str = '"}]') -> list[int]:
    """Ids of a random answer that a grammar allows; the characters of `closing` are favoured."""
    ids: list[int] = []
    favoured = [ord(char) for char in closing]
    for _ in range(4000):
        mask = match.compute_bitmask()
        open_ids = [i for i in range(len(vocabulary.tokens)) if mask[i // 8] >> i % 8 & 1]
        if vocabulary.eos_token_id in open_ids and (len(open_ids) == 1 or rng.random() < 0.3):
            return ids
        ascii_ids = [i for i in open_ids if i < 0x80 or i >= 256] or open_ids
        favoured_ids = [i for i in ascii_ids if i in favoured]
        going_on = [i for i in ascii_ids if i != vocabulary.eos_token_id]
        choice = rng.choice(favoured_ids if favoured_ids and rng.random() < 0.5 else going_on)
        assert match.consume_token(choice)
        ids.append(choice)
    raise AssertionError("it never ends")
