"""Encoding of text to token ids by SentencePiece's byte-pair vocabularies with scores (`llama`)."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from realizar.errors import TokenizerError
from realizar.tokenizer.score_merges import merge_by_score, ranked_merges
from realizar.tokenizer.special_tokens import SpecialTokens
from realizar.tokenizer.tokenizers_models import BYTE_TOKENS, SPACE, Encode, library_encoder
from realizar.tokenizer.vocabulary import TokenType, Vocabulary

# For vocabularies above this size the part for Latin text is built first.
_LARGE_VOCABULARY = 100_000
_LATIN_CHARACTERS = f"\0-\xff\u2010-\u2026{SPACE}"
_LATIN = re.compile(f"[{_LATIN_CHARACTERS}]*")
_NUM_CODES = 0x110000


def by_score(vocabulary: Vocabulary, special: SpecialTokens) -> Encode:
    """Make SentencePiece's byte-pair encoding by score. Spaces in the text are already U+2581.

    Raises:
        TokenizerError: the vocabulary could not express some characters.
    """
    # The texts of user-defined tokens are cut out earlier, except spaces, which are escaped afterwards.
    mergeable = np.isin(special.types, (TokenType.NORMAL, TokenType.UNUSED))
    for index in np.flatnonzero(special.types == TokenType.USER_DEFINED).tolist():
        mergeable[index] = SPACE in vocabulary.tokens[index]
    unknown = special.ids.get("unknown")
    if any(token not in vocabulary.ids for token in BYTE_TOKENS) and unknown is None:
        raise TokenizerError(f"{vocabulary.path}: the vocabulary has neither all bytes nor an unknown token")
    lone = _lone_characters(vocabulary, mergeable)
    tokens = [*vocabulary.tokens, *lone]
    scores = np.concatenate([vocabulary.scores, np.zeros(len(lone), np.float32)])
    mergeable = np.concatenate([mergeable, np.zeros(len(lone), np.bool_)])
    unknown_text = None if unknown is None else vocabulary.tokens[unknown]

    def build(kept: NDArray[np.int64]) -> Encode:
        texts = [tokens[index] for index in kept.tolist()]
        ids = dict(zip(texts, kept.tolist(), strict=True))
        merges = ranked_merges(texts, scores[kept], mergeable[kept])
        if merges is None:
            return _merged_here(ids, scores.tolist(), mergeable, unknown)
        return _merged_by_library(ids, merges, unknown_text)

    everything = np.arange(len(tokens))
    large = len(tokens) > _LARGE_VOCABULARY
    encode = _InTwoParts(build, everything[_is_latin(tokens)], everything) if large else build(everything)
    return _spelled_out(encode, lone, len(vocabulary.tokens), vocabulary.ids, unknown) if lone else encode


def _merged_by_library(ids: dict[str, int], merges: Sequence[tuple[str, str]], unknown: str | None) -> Encode:
    from tokenizers import Tokenizer, models

    return library_encoder(
        Tokenizer(models.BPE(vocab=ids, merges=merges, byte_fallback=True, unk_token=unknown, fuse_unk=True))
    )


def _merged_here(
    ids: Mapping[str, int], scores: Sequence[float], mergeable: NDArray[np.bool_], unknown: int | None
) -> Encode:
    """Make an encoding without the library, for vocabularies in which different tokens have equal scores."""
    allowed = {token: index for token, index in ids.items() if mergeable[index]}

    def encode(text: str) -> list[int]:
        found: list[int] = []
        for piece in merge_by_score(text, allowed, scores):
            if piece in ids:
                found.append(ids[piece])
            else:
                found.extend(_as_bytes(piece, ids, unknown))
        return found

    return encode


def _lone_characters(vocabulary: Vocabulary, mergeable: NDArray[np.bool_]) -> list[str]:
    """Characters that occur in tokens and are not tokens themselves; they get ids above the vocabulary.

    Merging starts from all characters, while the library merges only tokens.
    """
    used = [vocabulary.tokens[index] for index in np.flatnonzero(mergeable).tolist()]
    seen = np.zeros(_NUM_CODES, np.bool_)
    seen[_codes(used)] = True
    return [chr(code) for code in np.flatnonzero(seen).tolist() if chr(code) not in vocabulary.ids]


def _spelled_out(
    encode: Encode, lone: Sequence[str], count: int, ids: Mapping[str, int], unknown: int | None
) -> Encode:
    """Replace ids above the vocabulary, of characters that were not merged, by bytes."""
    bytes_of = [_as_bytes(character, ids, unknown) for character in lone]
    return lambda text: [
        part for index in encode(text) for part in (bytes_of[index - count] if index >= count else (index,))
    ]


def _as_bytes(character: str, ids: Mapping[str, int], unknown: int | None) -> list[int]:
    found = [ids.get(BYTE_TOKENS[byte], unknown) for byte in character.encode()]
    return [index for index in found if index is not None]


class _InTwoParts:
    """Builds the vocabulary's part for Latin text now, and the whole vocabulary when a text needs it.

    Merging makes only tokens that consist of the text's own characters, so the other tokens can be omitted. A quarter
    of a million tokens take a second to build, which is half of the time until the first answer.
    """

    def __init__(
        self, build: Callable[[NDArray[np.int64]], Encode], latin: NDArray[np.int64], everything: NDArray[np.int64]
    ) -> None:
        self._build, self._everything = build, everything
        self._lock = threading.Lock()
        self._encode = build(latin)
        self._complete = False

    def __call__(self, text: str) -> list[int]:
        if not self._complete and not _LATIN.fullmatch(text):
            with self._lock:
                if not self._complete:
                    self._encode = self._build(self._everything)
                    self._complete = True
        return self._encode(text)


def _is_latin(tokens: Sequence[str]) -> NDArray[np.bool_]:
    """bool [tokens]: True for tokens that match `_LATIN`."""
    allowed = np.zeros(_NUM_CODES, np.bool_)
    allowed[[code for code in range(0x3000) if _LATIN.fullmatch(chr(code))]] = True
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    latin: NDArray[np.bool_] = np.logical_and.reduceat(allowed[_codes(tokens)], np.cumsum(lengths) - lengths)
    return latin


def _codes(tokens: Sequence[str]) -> NDArray[np.uint32]:
    return np.frombuffer("".join(tokens).encode("utf-32-le", "surrogatepass"), np.uint32)
