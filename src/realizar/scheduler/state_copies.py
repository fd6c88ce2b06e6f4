"""`StateCopies`: decides which rows of a step start from snapshots of states, and after which rows one is taken."""

from __future__ import annotations

from realizar.kv_cache.manager import KVCacheManager, Prefix
from realizar.scheduler.plan import Plan
from realizar.scheduler.sequence import Sequence
from realizar.scheduler.snapshot_places import SnapshotPlaces
from realizar.state_moves import NO_MOVES, StateMoves


class StateCopies:
    """Part of a scheduler. For a model without states, and without a prefix cache, it does nothing.

    Args:
        context_length: tokens per row. max_step_tokens: tokens of a step.
    """

    def __init__(self, cache: KVCacheManager, context_length: int, max_step_tokens: int) -> None:
        self._cache = cache
        self._places = SnapshotPlaces(
            cache.snapshot_counts.total, cache.block_size, context_length, max_step_tokens
        )  # fmt: skip

    def start(self, sequence: Sequence, prefix: Prefix, plan: Plan) -> None:
        """A sequence starts from a prefix: choose where its chunks are to end, so that snapshots are taken there."""
        if not self._cache.snapshot_counts.total:
            return
        if prefix.snapshot is not None:
            plan.restored[sequence] = prefix.snapshot
        request = sequence.request
        places = self._places.of_prompt(
            request.num_prompt_tokens, request.prompt_marks, prefix, is_shared=request.sampling.n > 1
        )
        sequence.places = tuple(
            place for place in places if not self._cache.has_snapshot(sequence.keys, sequence.token_ids, place)
        )

    def of_step(self, plan: Plan) -> StateMoves:
        """The copies of a planned step, whose tokens count as computed by now."""
        restored = tuple((sequence.own_row, snapshot) for sequence, snapshot in plan.restored.items())
        for _, snapshot in restored:
            self._cache.restore_snapshot(snapshot)
        taken: list[tuple[int, int]] = []
        for sequence in plan.tokens:
            if sequence.places and sequence.places[0] == sequence.num_computed_tokens:
                place, *later = sequence.places
                sequence.places = tuple(later)
                new = self._cache.take_snapshot(sequence.keys, sequence.token_ids, place)
                if new is not None:
                    taken.append((sequence.own_row, new))
        return StateMoves(restored, tuple(taken)) if restored or taken else NO_MOVES
