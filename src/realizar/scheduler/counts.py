"""`SchedulerCounts`, and the rate at which sequences end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_LEAST_WAIT_S = 1.0
_MOST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class SchedulerCounts:
    """Sequences by state now, and counts since the start.

    Attributes:
        running, waiting: sequences, each choice of a request being one.
        preemptions: sequences that gave up their blocks and were recomputed.
        prefix_cache_queries, prefix_cache_hits: prompt tokens looked up when a sequence first entered a step,
            and found.
        draft_tokens, accepted_tokens: tokens speculated, and those of them that were right.
    """

    running: int
    waiting: int
    preemptions: int
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


class EndTimes:
    """Times at which sequences ended, from which the next one's is estimated."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=32)

    def note(self, now_s: float) -> None:
        """A sequence ended."""
        self._times_s.append(now_s)

    def next_in_s(self, now_s: float) -> float:
        """Seconds after which another will have ended, by the mean of the last ones; 1 to 60."""
        if not self._times_s:
            return _LEAST_WAIT_S
        mean_s = (now_s - self._times_s[0]) / len(self._times_s)
        return min(max(mean_s, _LEAST_WAIT_S), _MOST_WAIT_S)
