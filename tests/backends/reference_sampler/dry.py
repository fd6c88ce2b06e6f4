"""DRY, "don't repeat yourself": penalises a token that would lengthen a repetition. numpy only.

By the description of its author (p-e-w, 2024): where the end of the sequence, of n tokens, occurred before, the token
that followed there loses `multiplier * base ** (n - allowed_length)`, for the longest such n of at least
`allowed_length`. No match extends over a sequence breaker, and breakers are never penalised.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from backends.reference_sampler.penalties import store
from realizar.sampling_params import SamplingParams

_LARGEST = float(np.finfo(np.float32).max)


class Dry:
    """Match lengths of one row, kept up to date token by token; derived from token ids alone.

    `_lengths[j + 1]` is how many tokens ending at j equal those at the end of the sequence; `_lengths[0]` is 0.
    Appending token x makes it `_lengths[j] + 1` where token j is x, else 0, and 0 everywhere if x is a breaker.
    """

    def __init__(self, sampling: SamplingParams, history: Sequence[int]) -> None:
        self._multiplier = sampling.dry_multiplier
        self._base = sampling.dry_base
        self._allowed = sampling.dry_allowed_length
        self._window = sampling.dry_penalty_last_n
        self._breakers = frozenset(sampling.dry_sequence_breakers)
        self._breaker_ids = np.array(sorted(self._breakers), np.int64)
        self.active = self._multiplier > 0.0 and self._window != 0
        tail = list(history if self._window < 0 else history[max(0, len(history) - self._window) :])
        self._size = len(tail) if self.active else 0
        self._tokens = np.zeros(max(64, 2 * self._size), np.int64)
        self._lengths = np.zeros(self._tokens.size + 1, np.int64)
        if self.active:
            self._tokens[: self._size] = tail
            self._lengths[1 : self._size + 1] = self._suffix_matches(tail)

    def _suffix_matches(self, tokens: list[int]) -> list[int]:
        """Match length at every index, 0 at the last: the Z function of the reversed sequence, linear in its length."""
        size = len(tokens)
        backwards = tokens[::-1]
        limit = next((i for i, token_id in enumerate(backwards) if token_id in self._breakers), size)
        lengths = [0] * size
        left = right = 0
        for i in range(1, size):
            length = min(lengths[i - left], right - i) if i < right else 0
            while i + length < size and backwards[length] == backwards[i + length]:
                length += 1
            lengths[i] = length
            if i + length > right:
                left, right = i, i + length
        return [min(length, limit) for length in reversed(lengths)]

    def _window_start(self) -> int:
        return 0 if self._window < 0 else max(0, self._size - self._window)

    def accept(self, token_id: int) -> None:
        """Append a token."""
        if not self.active:
            return
        last = self._size
        if last == self._tokens.size:
            self._tokens = np.concatenate((self._tokens, np.zeros_like(self._tokens)))
            self._lengths = np.concatenate((self._lengths, np.zeros_like(self._tokens[last:])))
        self._tokens[last] = token_id
        self._size += 1
        start = self._window_start()
        if token_id in self._breakers:
            self._lengths[: last + 2] = 0
            return
        extended = self._lengths[start:last] + 1
        self._lengths[start + 1 : last + 1] = extended * (self._tokens[start:last] == token_id)
        self._lengths[last + 1] = 0

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Penalise in place."""
        start, last = self._window_start(), self._size - 1
        lengths = self._lengths[start + 1 : last + 1]
        if start > 0:  # a match does not reach back beyond the window
            lengths = np.minimum(lengths, np.arange(1, lengths.size + 1))
        found = np.flatnonzero(lengths >= self._allowed)
        following = self._tokens[start + found + 1]
        usable = (following >= 0) & (following < logits.size) & ~np.isin(following, self._breaker_ids)
        ids, inverse = np.unique(following[usable], return_inverse=True)
        longest = np.zeros(ids.size, np.int64)
        np.maximum.at(longest, inverse, lengths[found[usable]])
        with np.errstate(over="ignore"):
            growth = np.power(self._base, (longest - self._allowed).astype(np.float64))
            penalty = np.minimum(self._multiplier * growth, _LARGEST)
        store(logits, ids.astype(np.intp), logits[ids].astype(np.float64) - penalty)
