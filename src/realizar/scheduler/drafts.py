"""Drafts by prompt lookup: what followed the last tokens when they stood in the sequence before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

_BYTES = 4  # of a token id


class DraftLookup:
    """The history of one sequence, searched for its own last tokens.

    Args:
        most_tokens: drafts at a time.
        longest, shortest: number of last tokens that must have stood before; the longest that has is taken.
    """

    def __init__(self, most_tokens: int, longest: int, shortest: int) -> None:
        self._most_tokens = most_tokens
        self._longest, self._shortest = longest, shortest
        self._allowed = most_tokens
        self._history = bytearray()

    def propose(self, token_ids: Sequence[int], most_tokens: int) -> tuple[int, ...]:
        """Up to `most_tokens` drafts that follow `token_ids`, which begin with those of every earlier call.

        Where the place found is so near the end that the history does not reach, the drafts themselves go on: a period
        repeats.
        """
        known = len(self._history) // _BYTES
        self._history += array("i", token_ids[known:]).tobytes()
        most_tokens = min(most_tokens, self._allowed)
        place = self._after_last_match(len(token_ids)) if most_tokens > 0 else None
        if place is None:
            return ()
        period = len(token_ids) - place
        return tuple(token_ids[place + index % period] for index in range(most_tokens))

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """So many of the drafts were right: propose twice as many next time, or fewer where they keep being wrong."""
        if num_drafts:
            self._allowed = min(self._most_tokens, max(1, 2 * num_accepted))

    def _after_last_match(self, num_tokens: int) -> int | None:
        """Index of the token after the latest earlier place of the longest run of last tokens that has one."""
        history = self._history
        for length in range(min(self._longest, num_tokens - 1), self._shortest - 1, -1):
            end = len(history) - _BYTES  # a match ends before the last token
            found = history.rfind(history[-length * _BYTES :], 0, end)
            while found >= 0 and found % _BYTES:
                found = history.rfind(history[-length * _BYTES :], 0, found + (length * _BYTES - 1))
            if found >= 0:
                return found // _BYTES + length
        return None
