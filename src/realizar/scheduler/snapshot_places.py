"""`SnapshotPlaces`: the tokens of a prompt after which its row's state is kept, as later prompts may go on from there.

A snapshot pays where another prompt is likely to part from this one: at the end of a message, since conversations are
edited, branched and continued there; before the generation prompt, since templates drop earlier reasoning; and where
two prompts were seen to part. Messages may be long, so that some places lie between. Of a prompt without messages that
nothing shares yet, the end is no place: a step would be spent on each prompt that never comes again.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

from realizar.kv_cache.manager import Prefix

MOST_OF_A_REQUEST = 16
"""Snapshots that one request may take, also where there is memory for many more."""
_SHARE = 4  # of all snapshots, one request may take one in so many
_CUTS_OF_A_STEP = 8


class SnapshotPlaces:
    """Chooses places, all of them ends of blocks.

    A request takes a quarter of the snapshots at most, so that one long prompt leaves those of others. A step ends at
    every place, and a step costs at least a pass through the weights: places of messages keep an eighth of a full
    step's tokens apart, and from the snapshot that the prompt starts from, so that a few short turns share one and the
    next turn computes some of them again. Between messages there is a place after each full step's tokens, where chunks
    would end anyway, or so many that a prompt as long as the context has enough of them.

    Args:
        num_snapshots: that there is memory for; without any there are no places.
        block_size: tokens per block.
        context_length: tokens per row. max_step_tokens: tokens of a step.
    """

    def __init__(self, num_snapshots: int, block_size: int, context_length: int, max_step_tokens: int) -> None:
        self._size = block_size
        self._most = min(MOST_OF_A_REQUEST, -(-num_snapshots // _SHARE))
        self._gap = self._up(max_step_tokens // _CUTS_OF_A_STEP)
        self._max_step_tokens = max_step_tokens
        self._least_interval = -(-context_length // max(self._most, 1))

    def of_prompt(
        self,
        num_tokens: int,
        marks: Iterable[int],
        prefix: Prefix,
        *,
        is_shared: bool = False,
        step_tokens: int | None = None,
    ) -> tuple[int, ...]:
        """Numbers of tokens, ascending, after each of which a snapshot is to be taken.

        Args:
            num_tokens: of the prompt; its last one is always computed with the choice after it.
            marks: numbers of tokens after which a message ends; others are ignored.
            prefix: what was found of the prompt.
            is_shared: several choices start from the prompt.
            step_tokens: of prompts, that a step may have by the speed that was measured; None is a full step.
        """
        if not self._most:
            return ()
        end = (num_tokens - 1) // self._size * self._size
        ends = sorted({min(mark, end) // self._size * self._size for mark in marks if 0 < mark <= num_tokens})
        ends = [place for place in ends if place]
        # After the last message there is a generation prompt, or a text that no mark ends.
        last = ends[-1] if ends and end - ends[-1] < self._gap else end
        parted = min(prefix.num_matched_tokens, end)
        wanted = [*([last] if ends or is_shared else ()), parted, *ends[:1]]
        least = prefix.num_tokens + self._gap if prefix.num_tokens else 1
        fixed = [place for place in dict.fromkeys(wanted) if place >= least][: self._most]
        interval = self._interval(step_tokens)
        between = range(interval, end, interval)
        gap = self._gap
        while len(places := _spread(fixed, (ends, between), prefix.num_tokens, gap)) > self._most:
            gap *= 2
        return tuple(places)

    def _interval(self, step_tokens: int | None) -> int:
        """The number of tokens between places within messages."""
        step = self._max_step_tokens
        if step_tokens is not None and step_tokens < step:
            step = 1 << max(step_tokens.bit_length() - 1, 0)
        return self._up(max(self._least_interval, step))

    def _up(self, num_tokens: int) -> int:
        """The number of tokens, at least one, rounded up to full blocks."""
        return -(-max(num_tokens, 1) // self._size) * self._size


def _spread(fixed: Sequence[int], others: Iterable[Sequence[int]], start: int, gap: int) -> list[int]:
    """Fixed places, and of each list of others, the last first, those beyond `start` with a gap to all before them."""
    places = sorted(fixed)
    for each in others:
        for place in reversed(each):
            index = bisect.bisect_left(places, place)
            before = places[index - 1] if index else start
            after = places[index] if index < len(places) else place + gap
            if place - before >= gap and after - place >= gap:
                places.insert(index, place)
    return places
