"""Lengths of prompts and answers by the percentiles that a study of real requests has published."""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol


class LengthSource(Protocol):
    """Lengths of words or tokens, at least 1."""

    def draw(self, rng: random.Random) -> int:
        """One length."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Lengths between known percentiles: even between two of them, and none above the highest.

    Attributes:
        source: the study.
        points: (share of all requests, length), both rising; the first share is 0 and its length the shortest.
    """

    source: str
    points: tuple[tuple[float, int], ...]

    def draw(self, rng: random.Random) -> int:
        """One length; the requests above the highest known share have that share's length."""
        share = rng.random()
        shares = [known for known, _ in self.points]
        if share >= shares[-1]:
            return self.points[-1][1]
        place = bisect_right(shares, share)
        (low_share, low), (high_share, high) = self.points[place - 1], self.points[place]
        return round(low + (high - low) * (share - low_share) / (high_share - low_share))

    @property
    def mean(self) -> float:
        """The mean of what `draw` gives."""
        inside = sum((high - low) * (a + b) / 2 for (low, a), (high, b) in pairwise(self.points))
        return inside + (1 - self.points[-1][0]) * self.points[-1][1]


_STUDY = "BurstGPT's GPT-4 conversations, percentiles 50, 80, 95 and 99 as in table 1 of Llumnix (OSDI 2024)"

# BurstGPT (arXiv 2401.17644) is a trace of requests to Azure's OpenAI service. The study gives means of 830 and 271
# tokens; even between the percentiles, with 1 as the shortest, they are 883 and 288.
TRACE_PROMPTS = Quantiles(_STUDY, ((0.0, 1), (0.5, 582), (0.8, 1427), (0.95, 2345), (0.99, 3549)))
TRACE_ANSWERS = Quantiles(_STUDY, ((0.0, 1), (0.5, 243), (0.8, 434), (0.95, 669), (0.99, 964)))
