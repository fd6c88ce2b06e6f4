"""`StateCopies`: decides which rows of a step start from snapshots of states, and after which rows one is taken."""

from __future__ import annotations

from realizar.kv_cache.manager import KVCacheManager, Prefix
from realizar.kv_cache.snapshot_tiers import Taken
from realizar.outputs import SnapshotUse
from realizar.scheduler.open_sequences import OpenSequences
from realizar.scheduler.pace import Pace
from realizar.scheduler.plan import Plan
from realizar.scheduler.sequence import Sequence
from realizar.scheduler.snapshot_places import SnapshotPlaces
from realizar.state_moves import NO_MOVES, StateMoves


class StateCopies:
    """Part of a scheduler. For a model without states, and without a prefix cache, it does nothing.

    Args:
        open_sequences: of the scheduler. context_length: tokens per row. max_step_tokens: tokens of a step.
        pace: knows how many tokens of prompts a step reads; None lets it read as many as fit.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        open_sequences: OpenSequences,
        context_length: int,
        max_step_tokens: int,
        pace: Pace | None = None,
    ) -> None:
        self._cache, self._open, self._pace, counts = cache, open_sequences, pace, cache.snapshot_counts
        most = counts.total + counts.host_total
        self._places = SnapshotPlaces(most, cache.block_size, context_length, max_step_tokens)

    def start(self, sequence: Sequence, prefix: Prefix, plan: Plan) -> None:
        """A sequence starts from a prefix: choose where its chunks are to end, so that snapshots are taken there."""
        if not self._cache.snapshot_counts.total:
            return
        if prefix.num_tokens:
            plan.restored[sequence] = prefix
        request = sequence.request
        places = self._places.of_prompt(
            request.num_prompt_tokens,
            request.prompt_marks,
            prefix,
            is_shared=request.sampling.n > 1,
            step_tokens=None if self._pace is None else self._pace.prompt_tokens(0),
        )
        sequence.places = tuple(
            place for place in places if not self._cache.has_snapshot(sequence.keys, sequence.token_ids, place)
        )

    def of_step(self, plan: Plan) -> StateMoves:
        """The copies of a planned step, whose tokens count as computed by now."""
        copies = _Copies()
        for sequence, prefix in plan.restored.items():  # all before any other: what they name is not given up
            if prefix.snapshot is not None:
                self._cache.restore_snapshot(prefix.snapshot)
                copies.restored.append((sequence.own_row, prefix.snapshot))
                sequence.snapshots = sequence.snapshots.plus(SnapshotUse(restored=1))
            elif prefix.host_snapshot is not None:
                self._cache.fetch_snapshot(prefix.host_snapshot)
                copies.fetched.append((sequence.own_row, prefix.host_snapshot))
                sequence.snapshots = sequence.snapshots.plus(SnapshotUse(restored=1, fetched=1))
        for row, host_snapshot in copies.fetched:
            copies.add(copies.kept, row, self._cache.keep_fetched(row, host_snapshot))
        for sequence in plan.tokens:
            if sequence.places and sequence.places[0] == sequence.num_computed_tokens:
                place, *later = sequence.places
                sequence.places = tuple(later)
                row, client = sequence.own_row, sequence.request.client.name
                new = self._cache.take_snapshot(row, sequence.keys, sequence.token_ids, place, client)
                if new is not None and new.is_new:
                    sequence.snapshots = sequence.snapshots.plus(SnapshotUse(taken=1))
                copies.add(copies.taken, row, new)
        self._count_dropped()
        return copies.moves()

    def _count_dropped(self) -> None:
        """Count what was dropped for rows since the last step, with their blocks or for other snapshots."""
        for row, count in self._cache.take_dropped().items():
            if (sequence := self._open.in_rows[row]) is not None:
                sequence.snapshots = sequence.snapshots.plus(SnapshotUse(dropped=count))


class _Copies:
    """The copies of a step that is being planned, as in `StateMoves`."""

    def __init__(self) -> None:
        self.restored: list[tuple[int, int]] = []
        self.taken: list[tuple[int, int]] = []
        self.stored: list[tuple[int, int]] = []
        self.fetched: list[tuple[int, int]] = []
        self.kept: list[tuple[int, int]] = []

    def add(self, pairs: list[tuple[int, int]], row: int, new: Taken | None) -> None:
        """Add a copy of a row to a new snapshot, if there is one, and of what that held before to the host."""
        if new is not None:
            pairs.append((row, new.snapshot))
            if new.stored is not None:
                self.stored.append((new.snapshot, new.stored))

    def moves(self) -> StateMoves:
        every = self.restored, self.taken, self.stored, self.fetched, self.kept
        return StateMoves(*map(tuple, every)) if any(every) else NO_MOVES
