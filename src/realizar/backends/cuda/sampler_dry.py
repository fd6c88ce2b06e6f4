"""DRY, "don't repeat yourself", for rows whose last tokens only the device knows. torch.

A token loses `multiplier * base ** (n - allowed_length)` where it would lengthen a repetition of n tokens. Match
lengths are kept per place: a token that equals the one just chosen has one more than the place before it had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from realizar.backends.cuda.sampler_penalties import LARGEST, bounded
from realizar.sampling_params import SamplingParams


@dataclass(slots=True)
class DryRow:
    """What the host knows of a row: its parameters and how many tokens its table has."""

    sampling: SamplingParams
    size: int
    breakers: torch.Tensor

    @property
    def window_start(self) -> int:
        window = self.sampling.dry_penalty_last_n
        return 0 if window < 0 else max(0, self.size - window)


class DryTable:
    """Tokens [rows, tokens] and match lengths [rows, tokens + 1], the latter shifted by one place; made when needed."""

    def __init__(self, max_rows: int, vocab_size: int, context_length: int, device: torch.device) -> None:
        self._shape, self._vocab_size, self._device = (max_rows, 2 * context_length + 2), vocab_size, device
        self._active: dict[int, DryRow] = {}
        self._tokens: torch.Tensor | None = None
        self._lengths: torch.Tensor | None = None

    def active(self, row: int) -> bool:
        return row in self._active

    def open(self, row: int, sampling: SamplingParams, history: Sequence[int]) -> None:
        window = sampling.dry_penalty_last_n
        if sampling.dry_multiplier <= 0.0 or window == 0:
            return
        if self._tokens is None or self._lengths is None:
            rows, places = self._shape
            self._tokens = torch.zeros((rows, places), dtype=torch.int64, device=self._device)
            self._lengths = torch.zeros((rows, places + 1), dtype=torch.int64, device=self._device)
        tail = list(history if window < 0 else history[max(0, len(history) - window) :])
        breakers = torch.tensor(sorted(sampling.dry_sequence_breakers), dtype=torch.int64, device=self._device)
        self._active[row] = DryRow(sampling, len(tail), breakers)
        self._tokens[row, : len(tail)] = torch.tensor(tail, dtype=torch.int64).to(self._device)
        self._lengths[row] = 0
        lengths = suffix_matches(tail, frozenset(sampling.dry_sequence_breakers))
        self._lengths[row, 1 : len(tail) + 1] = torch.tensor(lengths, dtype=torch.int64).to(self._device)

    def close(self, row: int) -> None:
        self._active.pop(row, None)

    def accept(self, rows: Sequence[int], choices: torch.Tensor) -> None:
        """Append tokens."""
        for index, row in enumerate(rows):
            state = self._active.get(row)
            if state is None or self._tokens is None or self._lengths is None:
                continue
            last, token = state.size, choices[index]
            self._tokens[row, last] = token
            state.size += 1
            start = state.window_start
            same = self._tokens[row, start:last] == token
            extended = (self._lengths[row, start:last] + 1) * same
            extended = torch.where((state.breakers == token).any(), 0, extended)
            self._lengths[row, start + 1 : last + 1] = extended
            self._lengths[row, last + 1] = 0

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> None:
        """Penalise in place."""
        for index, row in enumerate(rows):
            state = self._active.get(row)
            if state is not None and self._tokens is not None and self._lengths is not None and state.size > 1:
                self._apply(logits[index], state, self._tokens[row], self._lengths[row])

    def _apply(self, logits: torch.Tensor, state: DryRow, tokens: torch.Tensor, shifted: torch.Tensor) -> None:
        sampling, start, last = state.sampling, state.window_start, state.size - 1
        lengths = shifted[start + 1 : last + 1]
        if start > 0:  # a match does not reach back beyond the window
            lengths = torch.minimum(lengths, torch.arange(1, last - start + 1, device=self._device))
        following = tokens[start + 1 : last + 1]
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


def suffix_matches(tokens: Sequence[int], breakers: frozenset[int]) -> list[int]:
    """How many tokens ending at each place equal those at the end, 0 at the end itself; none reach over a breaker."""
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
