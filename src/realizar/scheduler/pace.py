"""`Policy` and `Pace`: the prompt tokens that a step may read beside decodes, so that streams keep their pace.

Two things are learned from the steps' times: the time of a step of decodes alone, by their number, and the time that a
prompt token adds, by its position. While sequences decode, a step reads as many prompt tokens as keep it under
`stretch` times the former; otherwise as many as fit. A time that is not known yet, or was measured long ago, is
measured by a step of decodes alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from realizar.batch import AsideWork

_ALONE_S = 0.05  # a step of prompts alone: a request that comes waits for the steps in flight
_ALONE_TOKENS = 2048  # which it may have however long they take: with fewer a GPU is not busy
_WORTH_FACTOR = 1.5  # and which larger ones have to exceed: a GPU starts those of so many tokens at once, others slowly
_DEAR_FACTOR = 2.0  # of a token over one that only fills a step up: then a step that is filled up is a longer one
_MOST_BESIDE = 1.25  # of a step's longest time, that one beside a chunk may take: a longer one of both gains no more
_SPACING = 1.08  # of a step's longest time, from the begin of a step beside a chunk to the next: clients see more of it
_FREE_SHARE = 4  # a tile that lacks no more than this part of it takes no longer when it is full
_LEAST_TOKENS = 2  # far behind in a small model's context, one costs as much as a step of decodes
_STALE_STEPS = 64  # steps with prompts after which decodes are measured again: under 1 % of the time
_STALE_STEPS_OF_LEAST = 8  # where next to nothing is read, decodes may have become slower, and not prompts dearer
_MOST_PROBES = 4
_DECODE_UP, _DECODE_DOWN = 0.4, 0.4  # seldom measured; the middle one of three, as a slow one would last 64 steps
_TOKEN_UP, _TOKEN_DOWN = 0.6, 0.4  # too long a step is felt, too short a one is not
_MOST_GROWTH = 1.25  # beside one tile: the first tokens of a chunk can be free, where decodes left a tile half empty
_FIRST_CHUNK_FACTOR = 1.5  # small chunks cost more a token than the whole steps that the first estimate comes from
_SHARED_STRETCH = 1.5  # of a step in which a client has more than the others, over one in which it has not
_SHARED_STEPS = 64  # of those, after which one without is measured again
_BESIDE_STRETCH = 1.5  # of a step and other work behind it, over a step of decodes alone
_BESIDE_SHARE = 0.5  # of what prompts may take beside decodes, that such work has while they are read
_BESIDE_STEPS = 16  # with such work, after which one without is measured
_NEAR_TOKENS = 512  # positions before this are measured together, those after it by powers of two
_FARTHER_FACTOR = 1.5  # a token twice as far, until it is measured: 1.2 to 1.9 in a model small enough to feel it


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules by which a step's token budget is filled.

    Attributes:
        first: `decode` keeps running streams at their pace; `prefill` reads all prompts that fit before any decode.
        stretch: times as long as a step of decodes alone that a step may take when prompts are read beside them;
            infinite where only throughput counts.
        least_step_s: seconds that such a step may take in any case: nobody can read a fast device's pace.
        measures_drafts: a backend proposes as many drafts as pay by measure, and not as many as it may (`DraftDepth`).
    """

    first: Literal["decode", "prefill"] = "decode"
    stretch: float = 2.5
    least_step_s: float = 0.012
    measures_drafts: bool = True


@dataclass(slots=True)
class _Estimate:
    """An average that follows its samples; one that is far off counts as half or twice the average."""

    seconds: float
    step: int
    num_decodes: int = 0  # of the last sample
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=3))

    def take_in(self, sample: float, step: int, up: float, down: float) -> None:
        sample = min(max(sample, 0.5 * self.seconds), 2.0 * self.seconds)
        self.seconds += (up if sample > self.seconds else down) * (sample - self.seconds)
        self.step = step

    def take_in_middle(self, sample: float, step: int, up: float, down: float) -> None:
        """Take in the middle one of the last three samples: one that stands alone is the machine's doing."""
        self.recent.append(sample)
        self.take_in(sorted(self.recent)[1] if len(self.recent) == 3 else sample, step, up, down)


class Pace:
    """Learns from every step's time.

    Args:
        stretch, least_s: as in `Policy`; an infinite stretch bounds nothing.
        tile_tokens: tokens that the device's matmuls take at once.
        sizes: numbers of tokens, ascending, to which the device pads a step with prompts; none where tiles count.
    """

    def __init__(self, stretch: float, tile_tokens: int, least_s: float = 0.0, sizes: Sequence[int] = ()) -> None:
        self._stretch, self._tile_tokens, self._least_s, self._sizes = stretch, tile_tokens, least_s, sizes
        self._num_steps = 0
        self._num_probes = 0
        self._last_chunk = tile_tokens
        self._decode: dict[int, _Estimate] = {}
        self._num_shared_steps = 0
        self._submitted: deque[tuple[float, bool]] = deque()  # of steps in flight; True where other work was before one
        self._num_beside, self._is_behind = 0, False  # steps with such work; True if some comes before the next step
        self._behind_s = 0.0  # of that work, before a step of which decodes are a part
        self._last_s, self._last_decodes = -math.inf, 0  # of the last step that was submitted
        self._ended_s = -math.inf
        self._token_alone: _Estimate | None = None
        self._token_beside: dict[int, _Estimate] = {}
        self._decode_aside: dict[int, _Estimate] = {}  # of decodes, while a chunk is read aside

    @property
    def alone_token_s(self) -> float | None:
        """Seconds of a prompt token in steps without decodes; None before the first."""
        return None if self._token_alone is None else self._token_alone.seconds

    def prompt_tokens(
        self, num_decode_tokens: int, position: int = 0, equal: int | None = None, *, is_much: bool = False
    ) -> int | None:
        """Prompt tokens that the next step may read beside `num_decode_tokens` of decodes; None is no limit.

        Args:
            position: tokens before them, in the prompt that is farthest.
            equal: the decodes of a step of which all clients have as many each, by which the step is measured.
            is_much: clients who have read more than their share beside decodes of others make it half as long again.
        """
        if math.isinf(self._stretch):
            return None
        if num_decode_tokens == 0:
            return self._alone_tokens()
        token_s = self._token_s(_distance(position))
        if token_s is None:
            return None
        decode = self._decode.get(_bucket(num_decode_tokens))
        stretch, least_s = (_SHARED_STRETCH, 0.0) if is_much else (self._stretch, self._least_s)
        spare_s = 0.0
        if decode is not None:
            alone = decode if equal is None else self._decode.get(_bucket(equal), decode)
            spare_s = max(min(stretch, self._stretch) * alone.seconds, least_s) - decode.seconds
            spare_s -= self._behind_s
        chunk = min(spare_s / max(token_s, 1e-9), _MOST_GROWTH * self._last_chunk + self._tile_tokens)
        stale_steps = _STALE_STEPS if chunk >= 2 * _LEAST_TOKENS else _STALE_STEPS_OF_LEAST
        if (decode is None or self._num_steps - decode.step > stale_steps) and self._num_probes < _MOST_PROBES:
            self._num_probes += 1
            return 0
        tokens = max(int(chunk), _LEAST_TOKENS)
        if self._sizes:
            return self._of_a_size(num_decode_tokens, tokens, token_s)
        lacking = -(num_decode_tokens + tokens) % self._tile_tokens
        return tokens + lacking if lacking <= min(self._tile_tokens // _FREE_SHARE, tokens // 3) else tokens

    def lets_aside(self, num_decode_tokens: int) -> bool:
        """True if a prompt may be read aside: so many decodes keep their pace beside it, or it was never tried."""
        if math.isinf(self._stretch):
            return False
        bucket = _bucket(num_decode_tokens)
        alone, aside = self._decode.get(bucket), self._decode_aside.get(bucket)
        if alone is None or aside is None:
            return True
        return aside.seconds <= max(_MOST_BESIDE * self._stretch * alone.seconds, self._least_s)

    def _alone_tokens(self) -> int | None:
        """Prompt tokens of a step without decodes."""
        if self._token_alone is None:
            return None
        tokens = int(_ALONE_S / max(self._token_alone.seconds, 1e-9))
        return tokens if tokens >= _WORTH_FACTOR * _ALONE_TOKENS else _ALONE_TOKENS

    def _of_a_size(self, num_decode_tokens: int, tokens: int, token_s: float) -> int:
        """The prompt tokens that fill the size nearest to so many: with fewer the device would take as long.

        Where a token takes much longer than one that only fills a step up, as far behind in a long prompt, a step that
        is filled up is a longer one: then there are so many, but for those that cost less than the size they begin.
        """
        place = bisect_left(self._sizes, num_decode_tokens + tokens)
        around = [size - num_decode_tokens for size in self._sizes[max(place - 1, 0) : place + 1]]
        least = min(tokens, _LEAST_TOKENS)
        padding_s = self._token_beside[min(self._token_beside)].seconds if self._token_beside else math.inf
        if token_s > _DEAR_FACTOR * padding_s:
            below, above = around[0], around[-1]
            cost_more = (above - tokens) * padding_s > (tokens - below) * token_s
            return below if below >= least and cost_more else tokens
        return min((count for count in around if count >= least), key=lambda count: abs(count - tokens), default=tokens)

    def most_decodes(self, equal: int, wanted: int, *, leaves_room: bool) -> int:
        """Decodes of those wanted that a step may have, where clients with as many each would have `equal`.

        It takes at most half as long again as a step of those, which is measured now and then; a quarter with prompts.
        """
        if wanted <= equal or math.isinf(self._stretch):
            return wanted
        self._num_shared_steps += 1
        alone = self._decode.get(_bucket(equal))
        if alone is None or self._num_shared_steps % _SHARED_STEPS == 0:
            return equal
        stretch = (1.0 + _SHARED_STRETCH) / 2 if leaves_room else _SHARED_STRETCH
        count, count_s, most_s = 0, 0.0, stretch * alone.seconds
        for _, known in sorted(self._decode.items()):
            seconds, size = known.seconds, known.num_decodes
            if seconds > most_s:
                share = (most_s - count_s) / (seconds - count_s)
                return min(max(int(count + share * (size - count)), equal), wanted)
            count, count_s = size, max(seconds, count_s)
        return min(max(int(count * most_s / max(count_s, 1e-9)), equal), wanted)

    def submitted(self, now_s: float, num_decode_tokens: int = 0) -> None:
        """A step is submitted; `num_decode_tokens` are 0 where it has others, too."""
        self._submitted.append((now_s, self._is_behind))
        self._is_behind, self._behind_s = False, 0.0
        self._last_s, self._last_decodes = now_s, num_decode_tokens

    def pause_s(self, now_s: float) -> float:
        """Seconds for which no step beside a chunk need begin: what decodes take of the device, the chunk lacks."""
        alone = self._decode.get(_bucket(self._last_decodes)) if self._last_decodes else None
        if alone is None or math.isinf(self._stretch):
            return 0.0
        return max(self._last_s + _SPACING * self._stretch * alone.seconds - now_s, 0.0)

    def beside_s(self, num_decode_tokens: int, *, is_much: bool, reads: bool = False, is_shared: bool = False) -> float:
        """Seconds of other work that may come between this step and the next, whose time then counts for nothing.

        It is half the time of a step of so many decodes alone, or with `is_much` what prompts may take beside these, or
        half of that if this step `reads` any: the next one reads as much less. Beside other clients' streams, if it
        `is_shared`, both have no more than half a step. 0 where the time of steps is to be measured, and no limit
        without decodes.
        """
        if math.isinf(self._stretch) or not num_decode_tokens:
            self._is_behind = True
            return math.inf
        alone_s = self._nearest_s(num_decode_tokens)
        self._num_beside += 1
        if alone_s is None or self._num_beside % _BESIDE_STEPS == 0:
            return 0.0
        stretch, least_s = (_SHARED_STRETCH, 0.0) if is_shared else (self._stretch, self._least_s)
        most_s = max(min(stretch, self._stretch) * alone_s, least_s) - alone_s
        self._is_behind, self._behind_s = True, (_BESIDE_STRETCH - 1.0) * alone_s
        if reads or is_much:
            self._behind_s = most_s * (_BESIDE_SHARE if reads else 1.0)
        return self._behind_s

    def _nearest_s(self, num_decode_tokens: int) -> float | None:
        """Of a step of so many decodes or fewer alone, or beside a chunk, where none was alone yet."""
        for known in (self._decode, self._decode_aside):
            if smaller := [bucket for bucket in known if bucket <= _bucket(num_decode_tokens)]:
                return known[max(smaller)].seconds
        return None

    def ended(
        self, num_decode_tokens: int, num_prompt_tokens: int, now_s: float, position: int = 0,
        aside: AsideWork | None = None,
    ) -> None:  # fmt: skip
        """Take in the oldest step in flight, which began when it was submitted, or when the one before it ended."""
        submitted_s, is_behind = self._submitted.popleft()
        started_s = max(submitted_s, self._ended_s)
        self._ended_s = now_s
        if is_behind and (num_decode_tokens or self._token_alone is not None):
            return  # else it tells something at least: what is too long is soon halved by others
        if aside is not None:
            if num_decode_tokens and not num_prompt_tokens and not aside.is_awaited:
                sample, bucket = now_s - started_s, _bucket(num_decode_tokens)
                known = self._decode_aside.setdefault(bucket, _Estimate(sample, self._num_steps))
                known.take_in_middle(sample, self._num_steps, _DECODE_UP, _DECODE_DOWN)
            return
        self.observe(num_decode_tokens, num_prompt_tokens, now_s - started_s, position)

    def lost(self) -> None:
        self._submitted.clear()
        self._behind_s, self._is_behind = 0.0, False

    def observe(self, num_decode_tokens: int, num_prompt_tokens: int, seconds: float, position: int = 0) -> None:
        """Take in the time of a step. `position`: tokens before those of prompts, in the mean."""
        self._num_probes = 0
        if num_prompt_tokens == 0:
            bucket = _bucket(num_decode_tokens)
            known = self._decode.setdefault(bucket, _Estimate(seconds, self._num_steps))
            known.num_decodes = num_decode_tokens
            known.take_in_middle(seconds, self._num_steps, _DECODE_UP, _DECODE_DOWN)
        elif num_decode_tokens == 0:
            sample = seconds / num_prompt_tokens
            self._token_alone = self._token_alone or _Estimate(sample, self._num_steps)
            self._token_alone.take_in(sample, self._num_steps, _TOKEN_UP, _TOKEN_DOWN)
        else:
            self._num_steps += 1
            self._last_chunk = num_prompt_tokens
            decode = self._decode.get(_bucket(num_decode_tokens))
            if decode is not None:
                self._learn_token(decode.seconds, num_prompt_tokens, seconds, _distance(position))

    def _learn_token(self, decode_s: float, num_tokens: int, seconds: float, distance: int) -> None:
        """Attribute the time beyond the expected one to prompt tokens, by their share of it: a moment may be slow."""
        token_s = self._token_s(distance)
        if token_s is None:
            token_s = max(seconds - decode_s, 0.1 * seconds) / num_tokens
        prompt_s = num_tokens * token_s
        share = prompt_s**2 / max(prompt_s**2 + decode_s**2, 1e-18)
        sample = token_s + share * (seconds - decode_s - prompt_s) / num_tokens
        known = self._token_beside.setdefault(distance, _Estimate(token_s, self._num_steps))
        known.take_in_middle(sample, self._num_steps, _TOKEN_UP, _TOKEN_DOWN)

    def _token_s(self, distance: int) -> float | None:
        """Seconds that a prompt token adds at a distance, estimated from other distances where it was not measured."""
        known = self._token_beside
        if distance in known:
            return known[distance].seconds
        if nearer := [other for other in known if other < distance]:
            return known[max(nearer)].seconds * _FARTHER_FACTOR ** (distance - max(nearer))
        if known:
            return known[min(known)].seconds
        return None if self._token_alone is None else _FIRST_CHUNK_FACTOR * self._token_alone.seconds


def _distance(position: int) -> int:
    """Group positions that are measured together: 0 has the first ones, and each further group is twice as wide."""
    return (position // _NEAR_TOKENS).bit_length()


def _bucket(num_decode_tokens: int) -> int:
    """Group numbers of decodes that are measured together: each alone up to 4, then those less than a fifth apart."""
    return num_decode_tokens if num_decode_tokens <= 4 else int(4 * math.log2(num_decode_tokens)) - 4
