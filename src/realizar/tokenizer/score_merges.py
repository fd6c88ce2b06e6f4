"""Conversion of SentencePiece's merging by score to the ranked merges of the tokenizers library. numpy only.

SentencePiece merges, again and again, the neighbours whose joint token has the highest score, the leftmost of equals.
Within the span of one token this goes as it does for that token alone, so of a token's splits into two tokens only one
is ever seen; listing all splits, ranked by the score of the whole, gives the library the same order. That holds while
different tokens have different scores; among runs of one character that share a score (spaces in old vocabularies) the
leftmost grows, so the longer run goes first. Where other tokens share a score no ranking exists: `merge_by_score`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray


def ranked_merges(
    tokens: Sequence[str], scores: NDArray[np.float32], mergeable: NDArray[np.bool_]
) -> list[tuple[str, str]] | None:
    """Merges in order of rank, or None if equal scores allow no ranking.

    Args:
        tokens: text by id, no two equal.
        scores: float32 [tokens].
        mergeable: bool [tokens]; false for tokens that merging never makes (control tokens, bytes).
    """
    whole, left, right = _splits(tokens, mergeable)
    lengths = np.fromiter(map(len, tokens), np.int32, len(tokens))
    order = np.lexsort((whole, -lengths[whole], -scores[whole]))
    whole = whole[order]
    ties = np.flatnonzero((scores[whole[1:]] == scores[whole[:-1]]) & (whole[1:] != whole[:-1]))
    if not all(_same_run(tokens[whole[tie]], tokens[whole[tie + 1]]) for tie in ties.tolist()):
        return None
    text = tokens.__getitem__
    return list(zip(map(text, left[order].tolist()), map(text, right[order].tolist()), strict=True))


def _same_run(one: str, other: str) -> bool:
    return one == one[0] * len(one) and other == one[0] * len(other)


def _splits(tokens: Sequence[str], mergeable: NDArray[np.bool_]) -> tuple[NDArray[np.int64], ...]:
    """All (whole, left, right) of ids for which two tokens spell a third, by 64-bit hashes of the pieces.

    A quarter of a million tokens have over a million cuts, too many to look up one by one. The hash of characters
    i to j is (prefix[j] - prefix[i]) / base**i modulo 2**64; two of these pieces agree by chance once in 10**8 files.
    """
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    ends = np.cumsum(lengths)
    characters = np.frombuffer("".join(tokens).encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    characters = (characters + np.uint64(1)) * _MIX
    characters ^= characters >> np.uint64(29)
    powers = _powers(_BASE, len(characters) + 1)
    inverse = _powers(np.uint64(pow(int(_BASE), -1, 1 << 64)), len(characters) + 1)
    prefix = np.zeros(len(characters) + 1, np.uint64)
    np.cumsum(characters * powers[:-1], out=prefix[1:])

    def hashes(start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.uint64]:
        return (prefix[end] - prefix[start]) * inverse[start]

    find = _index(hashes(ends - lengths, ends))
    # One entry per place inside a token; the first cut of a token is after its first character.
    cuts = np.where(mergeable, lengths - 1, 0)
    whole = np.repeat(np.arange(len(tokens)), cuts)
    cut = np.arange(len(whole)) - np.repeat(np.cumsum(cuts) - cuts, cuts) + 1 + (ends - lengths)[whole]
    left = find(hashes((ends - lengths)[whole], cut))
    whole, cut, left = (array[left >= 0] for array in (whole, cut, left))
    right = find(hashes(cut, ends[whole]))
    return whole[right >= 0], left[right >= 0], right[right >= 0]


def _index(known: NDArray[np.uint64]) -> Callable[[NDArray[np.uint64]], NDArray[np.int64]]:
    """Make a function from hashes to their places in `known`, or -1, with tables indexed by some bits of the hash.

    Three times as fast as a binary search, which misses the cache at every step.
    """
    tables: list[tuple[NDArray[np.int32], np.uint64]] = []
    left = np.arange(len(known), dtype=np.int32)
    for shift in (42, 31, 20, 9):
        table = np.zeros(1 << 22, np.int32)
        place = (known[left] >> np.uint64(shift)) & _TABLE_MASK
        table[place] = left
        tables.append((table, np.uint64(shift)))
        left = left[table[place] != left]
        if not len(left):
            break

    def find(wanted: NDArray[np.uint64]) -> NDArray[np.int64]:
        found = np.full(len(wanted), -1, np.int64)
        for table, shift in tables:
            candidate = table[(wanted >> shift) & _TABLE_MASK]
            np.copyto(found, candidate, where=known[candidate] == wanted)
        return found

    return find


def _powers(base: np.uint64, count: int) -> NDArray[np.uint64]:
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors)


_BASE = np.uint64(0x9E3779B97F4A7C15)
_TABLE_MASK = np.uint64((1 << 22) - 1)
_MIX = np.uint64(0xD6E8FEB86659FD93)


def merge_by_score(text: str, ids: Mapping[str, int], scores: Sequence[float]) -> list[str]:
    """The pieces of `text`, merged by score; for vocabularies without a ranking by `ranked_merges`.

    Pieces are tokens, or single characters outside the vocabulary.
    """
    pieces: list[str] = list(text)
    following = list(range(1, len(pieces) + 1))
    preceding = list(range(-1, len(pieces) - 1))
    queue: list[tuple[float, int, int, int]] = []

    def consider(left: int, right: int) -> None:
        if left >= 0 and right < len(pieces):
            index = ids.get(pieces[left] + pieces[right])
            if index is not None:
                heapq.heappush(queue, (-scores[index], left, right, len(pieces[left]) + len(pieces[right])))

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
