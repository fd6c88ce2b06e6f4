"""Encoding of text to token ids by SentencePiece's byte-pair vocabularies with scores (`llama`).

SentencePiece merges, again and again, the neighbours whose joint token has the highest score, the leftmost of equals. A
merge makes a token, so it never joins two characters that no token has side by side. A text is cut there, into pieces
of a word or less, which are merged by themselves and remembered. A vocabulary of a quarter of a million tokens is ready
in a tenth of a second; the tokenizers library takes a second or more to build it, and holds the interpreter's lock.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from realizar.errors import TokenizerError
from realizar.tokenizer.special_tokens import SpecialTokens
from realizar.tokenizer.tokenizers_models import BYTE_TOKENS, SPACE, Encode
from realizar.tokenizer.vocabulary import TokenType, Vocabulary

_KEPT_PIECES = 1 << 15
_LONGEST_KEPT = 64
_TABLE_BITS = 22
_BASE = np.uint64(0x9E3779B97F4A7C15)
_CODE_BITS = np.uint64(21)


def by_score(vocabulary: Vocabulary, special: SpecialTokens) -> Encode:
    """Make SentencePiece's byte-pair encoding by score. Spaces in the text are already U+2581.

    Raises:
        TokenizerError: the vocabulary could not express some characters.
    """
    # The texts of user-defined tokens are cut out earlier, except spaces, which are escaped afterwards.
    mergeable = np.isin(special.types, (TokenType.NORMAL, TokenType.UNUSED))
    for index in np.flatnonzero(special.types == TokenType.USER_DEFINED).tolist():
        mergeable[index] = SPACE in vocabulary.tokens[index]
    ids, unknown = vocabulary.ids, special.ids.get("unknown")
    has_bytes = all(token in ids for token in BYTE_TOKENS)
    if not has_bytes and unknown is None:
        raise TokenizerError(f"{vocabulary.path}: the vocabulary has neither all bytes nor an unknown token")
    places = np.flatnonzero(mergeable)
    costs = dict(
        zip(map(vocabulary.tokens.__getitem__, places.tolist()), (-vocabulary.scores[places]).tolist(), strict=True)
    )
    neighbours = _Neighbours(list(costs))

    def merged(piece: str) -> list[int]:
        found: list[int] = []
        for token in merge_by_score(piece, costs):
            index = ids.get(token)
            found.extend(_spelled(token, ids, unknown) if index is None else (index,))
        return found

    kept = functools.lru_cache(maxsize=_KEPT_PIECES)(merged)

    def encode(text: str) -> list[int]:
        found: list[int] = []
        for piece in neighbours.cut(text):
            found.extend(kept(piece) if len(piece) <= _LONGEST_KEPT else merged(piece))
        return found if has_bytes else _fused(found, unknown)

    return encode


def merge_by_score(text: str, costs: Mapping[str, float]) -> list[str]:
    """The pieces of `text`, merged in order of cost: tokens, or single characters outside the vocabulary.

    Args:
        costs: the negated score of each token that a merge may make.
    """
    pieces = list(text)
    following = list(range(1, len(pieces) + 1))
    preceding = list(range(-1, len(pieces) - 1))
    queue: list[tuple[float, int, int, int]] = []

    def consider(left: int, right: int) -> None:
        if left >= 0 and right < len(pieces):
            cost = costs.get(pieces[left] + pieces[right])
            if cost is not None:
                heapq.heappush(queue, (cost, left, right, len(pieces[left]) + len(pieces[right])))

    for left in range(len(pieces) - 1):
        consider(left, left + 1)
    while queue:
        _, left, right, size = heapq.heappop(queue)
        if not pieces[left] or not pieces[right] or len(pieces[left]) + len(pieces[right]) != size:
            continue  # one of the two has been merged since
        pieces[left] += pieces[right]
        pieces[right] = ""
        following[left] = following[right]
        if following[left] < len(pieces):
            preceding[following[left]] = left
        consider(preceding[left], left)
        consider(left, following[left])
    return [piece for piece in pieces if piece]


class _Neighbours:
    """Knows which characters stand side by side in a token, by a table of hashes.

    Pairs that share a hash with one of these count as such too, which leaves a text in larger pieces, and as right.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        ends = np.cumsum(np.fromiter(map(len, tokens), np.int64, len(tokens)))
        hashes = _pair_hashes("".join(tokens))
        within = np.ones(len(hashes), np.bool_)
        within[ends[:-1] - 1] = False  # the last character of a token, and the first of the next one
        self._known = np.zeros(1 << _TABLE_BITS, np.bool_)
        self._known[hashes[within]] = True

    def cut(self, text: str) -> Iterator[str]:
        """The text in order, cut where no merge can join."""
        start = 0
        for end in (np.flatnonzero(~self._known[_pair_hashes(text)]) + 1).tolist():
            yield text[start:end]
            start = end
        if start < len(text):
            yield text[start:]


def _pair_hashes(text: str) -> NDArray[np.uint64]:
    """uint64 [characters - 1]: a hash of each character with the next one."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    pairs = (codes[:-1] << _CODE_BITS) | codes[1:]
    hashes: NDArray[np.uint64] = (pairs * _BASE) >> np.uint64(64 - _TABLE_BITS)
    return hashes


def _spelled(character: str, ids: Mapping[str, int], unknown: int | None) -> list[int]:
    """A character outside the vocabulary as its bytes, or as the unknown token where one of them is missing."""
    found = [ids.get(BYTE_TOKENS[byte], unknown) for byte in character.encode()]
    known = [index for index in found if index is not None]
    return [unknown] if unknown is not None and unknown in known else known


def _fused(found: list[int], unknown: int | None) -> list[int]:
    """The ids with one unknown token for several in a row."""
    return [index for place, index in enumerate(found) if index != unknown or not place or found[place - 1] != unknown]
