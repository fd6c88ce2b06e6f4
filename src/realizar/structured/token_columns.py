"""`TokenColumns`: the bytes of all tokens by their place, so that all tokens are followed at once. numpy only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

_PART = 1 << 16  # tokens that are taken one byte further before `follow` yields


class TokenColumns:
    """Tokens in the order of their lengths, the longest first.

    Args:
        tokens: the bytes of each id.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
        self._ids = np.argsort(-lengths, kind="stable")
        ordered = lengths[self._ids]
        self._starts = np.cumsum(ordered) - ordered
        self._bytes = np.frombuffer(b"".join([tokens[index] for index in self._ids.tolist()]), np.uint8)
        self._counts = [int(np.count_nonzero(ordered > place)) for place in range(int(ordered.max(initial=0)))]

    def follow(self, steps: NDArray[np.int16], state: int, out: NDArray[np.int16]) -> Iterator[None]:
        """Write the state after each token, int16 [ids]; between the parts of the work it yields.

        Args:
            steps: int16 [states + 1, 256], the state after each byte; the last state goes on to itself.
        """
        states = np.full(len(self._ids), state, np.int16)
        num_done = 0
        for place, count in enumerate(self._counts):
            states[:count] = steps[states[:count], self._bytes[self._starts[:count] + place]]
            num_done += count
            if num_done >= _PART:
                num_done = 0
                yield
        states[self._counts[0] if self._counts else 0 :] = len(steps) - 1  # ids without text
        out[self._ids] = states
