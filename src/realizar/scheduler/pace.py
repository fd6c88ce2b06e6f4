"""`Pace`: how many prompt tokens a step may read beside decodes, so that running streams keep theirs.

Two things are learned from the steps' times: how long a step of decodes alone takes, by their number, and what a prompt
token adds. While anybody decodes, a step reads as many prompt tokens as keep it under `stretch` times the former; while
nobody does, as many as fit. What is not known yet, or was measured long ago, is measured by a step of decodes alone.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

TILE_TOKENS = 12  # the CPU's products take so many tokens at once; whole tiles cost least a token
_LEAST_TOKENS = 2  # far behind in a small model's context, one costs as much as a step of decodes
_STALE_STEPS = 64  # steps with prompts after which decodes are measured again: under 1 % of the time
_MOST_PROBES = 4
_RATE_UP, _RATE_DOWN = 0.6, 0.2  # too long a step is felt, too short a one is not
_MOST_GROWTH = 1.25  # beside one tile: the first tokens of a chunk can be free, where decodes left a tile half empty
_FIRST_CHUNK_DEARER = 1.5  # small chunks cost more a token than the whole steps that the first estimate comes from


@dataclass(slots=True)
class _Estimate:
    """An average that follows its samples; one that is far off counts as half or twice the average."""

    seconds: float
    step: int

    def take_in(self, seconds: float, step: int) -> None:
        sample = min(max(seconds, 0.5 * self.seconds), 2.0 * self.seconds)
        self.seconds += (_RATE_UP if sample > self.seconds else _RATE_DOWN) * (sample - self.seconds)
        self.step = step


class Pace:
    """Learns from every step's time.

    Args:
        stretch: times as long as a step of decodes alone that a step with decodes and prompts may take.
    """

    def __init__(self, stretch: float) -> None:
        self._stretch = stretch
        self._num_steps = 0
        self._num_probes = 0
        self._last_chunk = TILE_TOKENS
        self._decode: dict[int, _Estimate] = {}
        self._submitted_s: deque[float] = deque()  # of steps in flight
        self._ended_s = -math.inf
        self._token_alone: _Estimate | None = None
        self._token_beside: _Estimate | None = None

    def prompt_tokens(self, num_decode_tokens: int) -> int | None:
        """Prompt tokens that the next step may read beside so many tokens of decodes; None is no limit."""
        token_s = self._token_s()
        if num_decode_tokens == 0 or token_s is None:
            return None
        decode = self._decode.get(_bucket(num_decode_tokens))
        if (decode is None or self._num_steps - decode.step > _STALE_STEPS) and self._num_probes < _MOST_PROBES:
            self._num_probes += 1
            return 0
        spare_s = 0.0 if decode is None else (self._stretch - 1.0) * decode.seconds
        chunk = min(spare_s / max(token_s, 1e-9), _MOST_GROWTH * self._last_chunk + TILE_TOKENS)
        fitting = num_decode_tokens + int(chunk)
        whole_tiles = fitting // TILE_TOKENS * TILE_TOKENS - num_decode_tokens
        return whole_tiles if whole_tiles >= _LEAST_TOKENS else max(int(chunk), _LEAST_TOKENS)

    def submitted(self, now_s: float) -> None:
        """A step is on its way."""
        self._submitted_s.append(now_s)

    def ended(self, num_decode_tokens: int, num_prompt_tokens: int, now_s: float) -> None:
        """The oldest step on its way is done; it began when it was submitted, or when the one before it ended."""
        started_s = max(self._submitted_s.popleft(), self._ended_s)
        self._ended_s = now_s
        self.observe(num_decode_tokens, num_prompt_tokens, now_s - started_s)

    def observe(self, num_decode_tokens: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step took so long."""
        self._num_probes = 0
        if num_prompt_tokens == 0:
            bucket = _bucket(num_decode_tokens)
            self._decode[bucket] = self._follow(self._decode.get(bucket), seconds)
        elif num_decode_tokens == 0:
            self._token_alone = self._follow(self._token_alone, seconds / num_prompt_tokens)
        else:
            self._num_steps += 1
            self._last_chunk = num_prompt_tokens
            decode = self._decode.get(_bucket(num_decode_tokens))
            if decode is not None:
                added_s = max(seconds - decode.seconds, 0.1 * seconds) / num_prompt_tokens
                if self._token_beside is None and self._token_alone is not None:
                    self._token_beside = _Estimate(_FIRST_CHUNK_DEARER * self._token_alone.seconds, self._num_steps)
                self._token_beside = self._follow(self._token_beside, added_s)

    def _token_s(self) -> float | None:
        if self._token_beside is not None:
            return self._token_beside.seconds
        return None if self._token_alone is None else _FIRST_CHUNK_DEARER * self._token_alone.seconds

    def _follow(self, known: _Estimate | None, seconds: float) -> _Estimate:
        if known is None:
            return _Estimate(seconds, self._num_steps)
        known.take_in(seconds, self._num_steps)
        return known


def _bucket(num_decode_tokens: int) -> int:
    """Numbers of decodes that are measured together: each alone up to 4, then those less than a fifth apart."""
    return num_decode_tokens if num_decode_tokens <= 4 else int(4 * math.log2(num_decode_tokens)) - 4
