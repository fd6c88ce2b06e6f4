"""DRY, "don't repeat yourself", for rows whose last tokens only the device knows. torch.

A token loses `multiplier * base ** (n - allowed_length)` where it would lengthen a repetition of n tokens. Match
lengths are kept per place: a token that equals the one just chosen has one more than the place before it had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from realizar.backends.cuda.sampling.penalties import LARGEST, bounded
from realizar.backends.cuda.sampling.positions import Positions
from realizar.batch import OpenedRow
from realizar.sampling_params import SamplingParams


@dataclass(slots=True)
class DryRow:
    """A row's table and what the host knows of it.

    Attributes:
        size: tokens in the table.
        breakers: int64, ascending.
        tokens: int32 [places]. lengths: match lengths, int32 [places + 1], shifted by one place.
    """

    sampling: SamplingParams
    size: int
    breakers: torch.Tensor
    tokens: torch.Tensor
    lengths: torch.Tensor

    @property
    def window_start(self) -> int:
        window = self.sampling.dry_penalty_last_n
        return 0 if window < 0 else max(0, self.size - window)

    def append(self, token: torch.Tensor | int) -> None:
        """Take in the row's next token."""
        last = self.size
        self.tokens[last] = token
        self.size += 1
        start = self.window_start
        same = self.tokens[start:last] == token
        extended = (self.lengths[start:last] + 1) * same
        extended = torch.where((self.breakers == token).any(), 0, extended)
        self.lengths[start + 1 : last + 1] = extended
        self.lengths[last + 1] = 0

    def copy(self) -> DryRow:
        """The row with tables of its own, to look ahead."""
        return replace(self, tokens=self.tokens.clone(), lengths=self.lengths.clone())


class DryTable:
    """Tables of the rows that penalise repetitions: made when a row is opened, dropped when it is closed."""

    def __init__(self, vocab_size: int, context_length: int, device: torch.device) -> None:
        self._places, self._vocab_size, self._device = table_places(context_length), vocab_size, device
        self._active: dict[int, DryRow] = {}

    def active(self, row: int) -> bool:
        return row in self._active

    def open(self, opened: OpenedRow) -> None:
        sampling, history = opened.sampling, opened.history
        window = sampling.dry_penalty_last_n
        if sampling.dry_multiplier <= 0.0 or window == 0:
            return
        tail = list(history if window < 0 else history[max(0, len(history) - window) :])
        breakers = torch.tensor(sorted(sampling.dry_sequence_breakers), dtype=torch.int64, device=self._device)
        tokens, lengths = (torch.zeros(self._places + more, dtype=torch.int32, device=self._device) for more in (0, 1))
        tokens[: len(tail)] = torch.tensor(tail, dtype=torch.int32).to(self._device)
        matches = suffix_matches(tail, frozenset(sampling.dry_sequence_breakers))
        lengths[1 : len(tail) + 1] = torch.tensor(matches, dtype=torch.int32).to(self._device)
        self._active[opened.row] = DryRow(sampling, len(tail), breakers, tokens, lengths)

    def close(self, row: int) -> None:
        self._active.pop(row, None)

    def accept(self, row: int, token: torch.Tensor | int) -> None:
        """Append a token, which only the device need know."""
        state = self._active.get(row)
        if state is not None:
            state.append(token)

    def apply(self, logits: torch.Tensor, positions: Positions) -> None:
        """Penalise in place, [positions, vocab]: drafts before a position are tokens of its row."""
        ahead_row, ahead = -1, None  # the row looked at last, with the drafts before that position
        for index, row in enumerate(positions.rows):
            state = self._active.get(row)
            if state is None:
                continue
            if positions.place(index):
                assert positions.drafts is not None
                known = state.size
                if ahead is None or ahead_row != row:
                    ahead_row, ahead = row, state.copy()
                for number in range(ahead.size - known, positions.place(index)):
                    ahead.append(positions.drafts[index, number])
                state = ahead
            if state.size > 1:
                self._apply(logits[index], state)

    def _apply(self, logits: torch.Tensor, state: DryRow) -> None:
        sampling, start, last = state.sampling, state.window_start, state.size - 1
        lengths = state.lengths[start + 1 : last + 1].long()
        if start > 0:  # a match does not reach back beyond the window
            lengths = torch.minimum(lengths, torch.arange(1, last - start + 1, device=self._device))
        following = state.tokens[start + 1 : last + 1].long()
        usable = (following >= 0) & (following < self._vocab_size) & ~torch.isin(following, state.breakers)
        found = torch.where(usable, lengths, 0)
        longest = torch.zeros(self._vocab_size, dtype=torch.int64, device=self._device)
        longest.scatter_reduce_(0, torch.where(usable, following, 0), found, "amax")
        growth = torch.pow(
            torch.tensor(sampling.dry_base, dtype=torch.float64, device=self._device),
            (longest - sampling.dry_allowed_length).double(),
        )
        penalty = (sampling.dry_multiplier * growth).clamp(max=LARGEST)
        hit = longest >= max(sampling.dry_allowed_length, 1)
        if sampling.dry_allowed_length < 1:  # every token that follows anything
            seen = torch.zeros(self._vocab_size, dtype=torch.int64, device=self._device)
            seen.scatter_reduce_(0, torch.where(usable, following, 0), usable.long(), "amax")
            hit = seen > 0
        logits.copy_(torch.where(hit, bounded(logits.double() - penalty, logits), logits))


def table_places(context_length: int) -> int:
    """Tokens that a row's table has room for: a whole request, and what steps on their way choose after its end."""
    return context_length + 16


def suffix_matches(tokens: Sequence[int], breakers: frozenset[int]) -> list[int]:
    """For each place, how many tokens ending there equal those at the end; 0 at the end, none over a breaker."""
    size, backwards = len(tokens), list(tokens)[::-1]
    limit = next((place for place, token in enumerate(backwards) if token in breakers), size)
    lengths, left, right = [0] * size, 0, 0
    for place in range(1, size):
        length = min(lengths[place - left], right - place) if place < right else 0
        while place + length < size and backwards[length] == backwards[place + length]:
            length += 1
        lengths[place] = length
        if place + length > right:
            left, right = place, place + length
    return [min(length, limit) for length in reversed(lengths)]
