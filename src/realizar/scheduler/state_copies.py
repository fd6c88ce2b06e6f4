"""`StateCopies`: the rows of a step that start from snapshots of states, and those after which one is taken.

A snapshot pays where another prompt is likely to part from this one: at the end of a message, since conversations are
edited, branched and continued there; before the generation prompt, since templates drop earlier reasoning; and where
two prompts were seen to part. Messages may be long, so that some positions lie between. Of a prompt without messages
that nothing shares yet, the end is none: a step would be spent on each prompt that never comes again.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from collections.abc import Sequence as ListOf

import numpy as np

from realizar.batch import StateMoves
from realizar.kv_cache.manager import KVCacheManager, Prefix
from realizar.scheduler.growing_deltas import GrowingDeltas
from realizar.scheduler.open_sequences import OpenSequences
from realizar.scheduler.pace import Pace
from realizar.scheduler.plan import Plan
from realizar.scheduler.row_table import Sequence

MOST_OF_A_REQUEST = 16
"""Snapshots that one request may take, also where there is memory for many more."""
_SHARE = 4  # of all snapshots, one request may take one in so many
_CUTS_OF_A_STEP = 8


class SnapshotPositions:
    """Chooses positions, all of them ends of blocks. Without room for snapshots there are none.

    A request takes a quarter of the snapshots at most. A step ends at every position, and costs at least a pass through
    the weights: positions of messages keep an eighth of a full step's tokens apart, and from the snapshot that the
    prompt starts from, so that a few short turns share one. Between messages there is a position after each full step's
    tokens, where chunks would end anyway, or so many that a prompt as long as the context has enough of them.
    """

    def __init__(self, num_snapshots: int, block_size: int, context_length: int, max_step_tokens: int) -> None:
        self._size = block_size
        self._most = min(MOST_OF_A_REQUEST, -(-num_snapshots // _SHARE))
        self._gap = self._up(max_step_tokens // _CUTS_OF_A_STEP)
        self._max_step_tokens = max_step_tokens
        self._least_interval = -(-context_length // max(self._most, 1))

    def of_prompt(
        self, num_tokens: int, marks: Iterable[int], prefix: Prefix, *, is_shared: bool = False,
        step_tokens: int | None = None,
    ) -> tuple[int, ...]:  # fmt: skip
        """Numbers of tokens, ascending, after each of which a snapshot is to be taken.

        Args:
            num_tokens: of the prompt; its last one is always computed with the token sampled after it.
            marks: numbers of tokens after which a message ends; others are ignored.
            is_shared: several choices start from the prompt.
            step_tokens: of prompts, that a step may have by the speed that was measured; None is a full step.
        """
        if not self._most:
            return ()
        end = (num_tokens - 1) // self._size * self._size
        ends = sorted({min(mark, end) // self._size * self._size for mark in marks if 0 < mark <= num_tokens})
        ends = [position for position in ends if position]
        # After the last message there is a generation prompt, or a text that no mark ends.
        last = ends[-1] if ends and end - ends[-1] < self._gap else end
        parted = min(prefix.num_matched_tokens, end)
        wanted = [*([last] if ends or is_shared else ()), parted, *ends[:1]]
        least = prefix.num_tokens + self._gap if prefix.num_tokens else 1
        fixed = [position for position in dict.fromkeys(wanted) if position >= least][: self._most]
        step = self._max_step_tokens
        if step_tokens is not None and step_tokens < step:
            step = 1 << max(step_tokens.bit_length() - 1, 0)
        interval = self._up(max(self._least_interval, step))
        between = range(interval, end, interval)
        gap = self._gap
        while len(positions := _spread(fixed, (ends, between), prefix.num_tokens, gap)) > self._most:
            gap *= 2
        return tuple(positions)

    def _up(self, num_tokens: int) -> int:
        return -(-max(num_tokens, 1) // self._size) * self._size


def _spread(fixed: ListOf[int], others: Iterable[ListOf[int]], start: int, gap: int) -> list[int]:
    """Fixed positions, and of each list of others, the last first, those past `start` with a gap to all before them."""
    positions = sorted(fixed)
    for each in others:
        for position in reversed(each):
            index = bisect.bisect_left(positions, position)
            before = positions[index - 1] if index else start
            after = positions[index] if index < len(positions) else position + gap
            if position - before >= gap and after - position >= gap:
                positions.insert(index, position)
    return positions


class StateCopies:
    """Part of a scheduler. For a model without states, and without a prefix cache, it does nothing."""

    def __init__(self, cache: KVCacheManager, open_sequences: OpenSequences, deltas: GrowingDeltas, pace: Pace) -> None:
        self._cache, self._open, self._deltas, self._pace = cache, open_sequences, deltas, pace
        counts = cache.snapshots.counts
        most = counts.total + counts.host_total
        self._positions = SnapshotPositions(most, cache.block_size, cache.context_length, cache.max_step_tokens)

    def start(self, sequence: Sequence, prefix: Prefix, plan: Plan) -> None:
        """A sequence starts from a prefix: choose where its chunks are to end, so that snapshots are taken there."""
        if prefix.snapshot is not None:
            plan.restored[sequence] = prefix.snapshot
        request = sequence.request
        is_shared, step_tokens = request.sampling.n > 1, self._pace.prompt_tokens(0)
        positions = self._positions.of_prompt(
            request.num_prompt_tokens, request.prompt_marks, prefix, is_shared=is_shared, step_tokens=step_tokens
        )
        keys = sequence.keys.of(sequence.token_ids) if positions else ()
        size, has_snapshot = self._cache.block_size, self._cache.snapshots.has
        sequence.snapshot_positions = [at for at in positions if not has_snapshot(keys[at // size - 1])]

    def of_step(self, plan: Plan) -> StateMoves:
        snapshots = self._cache.snapshots
        for sequence, key in plan.restored.items():
            snapshots.restore(sequence.own_row, key)
        for sequence, key in plan.restored.items():
            snapshots.keep(sequence.own_row, key)
        for sequence in plan.prompts:
            if sequence.snapshot_positions and sequence.snapshot_positions[0] == sequence.num_computed_tokens:
                position = sequence.snapshot_positions.pop(0)
                row, client = sequence.own_row, sequence.request.client.name
                self._cache.take_snapshot(row, sequence.keys, sequence.token_ids, position, client)
        for row, use in snapshots.take_uses().items():
            for sequence in self._open.of_rows(np.array([row])):
                self._deltas.use_snapshots(sequence, use)
        return snapshots.take_moves()
