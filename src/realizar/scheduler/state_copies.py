"""`StateCopies`: the rows of a step that start from snapshots of states, and those after which one is taken.

A snapshot pays where another prompt is likely to part from this one: at the end of a message, since conversations are
edited, branched and continued there; before the generation prompt, since templates drop earlier reasoning; where two
prompts were seen to part; at the end of the answer, where the next turn goes on; and before its first call, which
clients may write anew. Messages may be long, so that some positions lie between. Of a prompt without messages that
nothing shares yet, the end is none: a step would be spent on each prompt that never comes again.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from collections.abc import Sequence as ListOf

import numpy as np

from realizar.batch import StateMoves
from realizar.kv_cache.manager import KVCacheManager, Prefix
from realizar.kv_cache.snapshot_tiers import Place
from realizar.scheduler.growing_deltas import GrowingDeltas
from realizar.scheduler.open_sequences import OpenSequences
from realizar.scheduler.pace import Pace
from realizar.scheduler.plan import Plan
from realizar.scheduler.row_table import RowTable, Sequence

MOST_OF_A_REQUEST = 16
"""Snapshots that one request may take, also where there is memory for many more."""
_SHARE = 4  # of all snapshots, one request may take one in so many
_CUTS_OF_A_STEP = 8
_FEW_ROWS = 8  # whose answers are copied at every block; of more, at every second, third, ... block


class SnapshotPositions:
    """Chooses positions, all of them ends of blocks. Without room for snapshots there are none.

    A request takes a quarter of the snapshots at most. A step ends at every position, and costs at least a pass through
    the weights: positions of messages keep an eighth of a full step's tokens apart, and from the snapshot that the
    prompt starts from, so that a few short ones share one. The end of the last message, where the next turn begins, has
    one in any case. Between messages there is a position after each full step's
    tokens, where chunks would end anyway, or so many that a prompt as long as the context has enough of them.
    """

    def __init__(self, num_snapshots: int, block_size: int, context_length: int, max_step_tokens: int) -> None:
        self._size = block_size
        self._most = min(MOST_OF_A_REQUEST, -(-num_snapshots // _SHARE))
        self.gap = self._up(max_step_tokens // _CUTS_OF_A_STEP)
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
        last = ends[-1] if ends and end - ends[-1] < self.gap else end
        parted = min(prefix.num_matched_tokens, end)
        wanted = [*([last] if ends or is_shared else ()), parted, *ends[:1]]
        least = prefix.num_tokens + self.gap if prefix.num_tokens else 1
        fixed = [at for at in dict.fromkeys(wanted) if at >= least or prefix.num_tokens < at == last]
        fixed = fixed[: self._most]
        step = self._max_step_tokens
        if step_tokens is not None and step_tokens < step:
            step = 1 << max(step_tokens.bit_length() - 1, 0)
        interval = self._up(max(self._least_interval, step))
        between = range(interval, end, interval)
        gap = self.gap
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


class TurnCopies:
    """The snapshots of one turn of a conversation: at the end of its prompt, before its first call, and at its end.

    Where an answer ends is known when it has. So its state is copied where blocks end, and a copy is given back as soon
    as the tokens are known that a later one follows.

    The next turn goes on from one of the three: from the end, from the call where a client writes calls anew, or from
    the prompt where a template drops reasoning. A conversation mostly goes on as before, so the one stays that is at
    the place from which this turn went on, or that of the prompt; the others are weak.

    Args:
        prefix: that the turn started from, and began: at which place of the turn before; None at none.
        gap: tokens after a snapshot of the turn before within which it is worth little beside a new one.
    """

    def __init__(self, sequence: Sequence, prefix: Prefix, began: Place | None, gap: int) -> None:
        self._sequence, self._began = sequence, began or "prompt"
        self._passed = prefix.snapshot if began else None  # of the turn before
        self._passed_until = prefix.num_tokens + gap
        self._calls = np.array(sequence.request.call_ids, np.int32)
        self._taken: list[tuple[int, int]] = []  # numbers of tokens, ascending, and the snapshots after them
        self._num_searched = sequence.request.num_prompt_tokens
        self._call: int | None = None  # tokens before the first one, once it is there
        self._keys: dict[Place, bytes] = {}

    def add_prompt(self, cache: KVCacheManager, num_tokens: int, key: bytes) -> None:
        """A snapshot is taken at the end of the prompt."""
        self._keys["prompt"] = key
        if self._passed is not None and num_tokens < self._passed_until:
            cache.snapshots.weaken(self._passed)

    def copy(self, cache: KVCacheManager) -> None:
        """Copy the state after the step that is being scheduled."""
        self._settle(cache)
        sequence = self._sequence
        row, client = sequence.own_row, sequence.request.client.name
        snapshot = cache.snapshots.take_unnamed(row, client, only_weak=self._began == "prompt")
        if snapshot is not None:
            self._taken.append((sequence.num_computed_tokens, snapshot))

    def end(self, cache: KVCacheManager) -> None:
        self._settle(cache)
        known = len(self._sequence.token_ids)
        for index, (num_tokens, snapshot) in enumerate(self._taken):
            if index == 0 and num_tokens <= known:
                self._name(cache, num_tokens, snapshot, "end")
            else:
                cache.snapshots.give_back(snapshot)
        kept = self._began if self._began in self._keys else "prompt"
        for place, key in self._keys.items():
            if place != kept:
                cache.snapshots.weaken(key)

    def _settle(self, cache: KVCacheManager) -> None:
        """Of the copies that the tokens known by now follow, leave the last one."""
        known = self._sequence.token_ids
        if self._call is None:
            found = np.isin(known[self._num_searched :], self._calls).nonzero()[0]
            self._call = self._num_searched + int(found[0]) if len(found) else None
            self._num_searched = len(known)
        while len(self._taken) > 1 and self._taken[1][0] <= len(known):
            num_tokens, snapshot = self._taken.pop(0)
            if self._call is not None and num_tokens <= self._call < self._taken[0][0]:
                self._name(cache, num_tokens, snapshot, "call")
            else:
                cache.snapshots.give_back(snapshot)

    def _name(self, cache: KVCacheManager, num_tokens: int, snapshot: int, place: Place) -> None:
        sequence = self._sequence
        key = sequence.keys.of(sequence.token_ids)[num_tokens // cache.block_size - 1]
        if cache.name_snapshot(sequence.own_row, snapshot, key, sequence.request.client.name, place):
            self._keys[place] = key


class StateCopies:
    """Part of a scheduler. For a model without states, and without a prefix cache, it does nothing."""

    def __init__(
        self, cache: KVCacheManager, table: RowTable, open_sequences: OpenSequences, deltas: GrowingDeltas, pace: Pace
    ) -> None:  # fmt: skip
        self._cache, self._table, self._open, self._deltas, self._pace = cache, table, open_sequences, deltas, pace
        counts = cache.snapshots.counts
        most = counts.total + counts.host_total
        self._positions = SnapshotPositions(most, cache.block_size, cache.context_length, cache.max_step_tokens)
        self._turns: dict[Sequence, TurnCopies] = {}
        self._most_turns = counts.total // (2 * _SHARE)  # each has two copies while the later one's tokens are unknown

    def start(self, sequence: Sequence, prefix: Prefix, plan: Plan) -> None:
        """A sequence starts from a prefix: choose where its chunks are to end, so that snapshots are taken there."""
        if prefix.snapshot is not None:
            plan.restored[sequence] = prefix.snapshot
        request, snapshots = sequence.request, self._cache.snapshots
        is_shared, step_tokens = request.sampling.n > 1, self._pace.prompt_tokens(0)
        positions = self._positions.of_prompt(
            request.num_prompt_tokens, request.prompt_marks, prefix, is_shared=is_shared, step_tokens=step_tokens
        )
        keys = sequence.keys.of(sequence.token_ids) if positions else ()
        size = self._cache.block_size
        sequence.snapshot_positions = [at for at in positions if not snapshots.has(keys[at // size - 1])]
        if request.prompt_marks and request.max_tokens and len(self._turns) < self._most_turns:
            self._turns[sequence] = TurnCopies(sequence, prefix, snapshots.place(prefix.snapshot), self._positions.gap)

    def of_step(self, plan: Plan) -> StateMoves:
        snapshots = self._cache.snapshots
        for sequence, key in plan.restored.items():
            snapshots.restore(sequence.own_row, key)
        for sequence, key in plan.restored.items():
            snapshots.keep(sequence.own_row, key)
        for sequence in plan.prompts:
            if sequence.snapshot_positions and sequence.snapshot_positions[0] == sequence.num_computed_tokens:
                self._take(sequence, sequence.snapshot_positions.pop(0))
        if self._turns:
            self._copy_answers(plan)
        self._note_uses()
        return snapshots.take_moves()

    def end(self, sequence: Sequence) -> None:
        """A sequence leaves its blocks: let what the next turn may go on from be found."""
        turn = self._turns.pop(sequence, None)
        if turn is not None:
            turn.end(self._cache)
            self._note_uses()

    def _take(self, sequence: Sequence, position: int) -> None:
        turn = None if sequence.snapshot_positions else self._turns.get(sequence)
        row, client, token_ids = sequence.own_row, sequence.request.client.name, sequence.token_ids
        place: Place | None = None if turn is None else "prompt"
        key = self._cache.take_snapshot(row, sequence.keys, token_ids, position, client, place)
        if turn is not None and key is not None:
            turn.add_prompt(self._cache, position, key)

    def _copy_answers(self, plan: Plan) -> None:
        """Copy the states of rows that have come to the end of a block of their answer, all tokens of it certain."""
        table, rows = self._table, np.array([each.own_row for each in plan.prompts], np.intp)
        rows = np.concatenate((plan.decodes if plan.num_drafts is None else plan.decodes[plan.num_drafts == 0], rows))
        interval = self._cache.block_size * -(-max(len(rows), 1) // _FEW_ROWS)
        are_ends = (table.num_computed[rows] % interval == 0) & (table.may_repeat[rows] == 0)
        for sequence in self._open.of_rows(rows[are_ends]):
            turn = self._turns.get(sequence)
            if turn is not None and sequence.num_computed_tokens >= sequence.request.num_prompt_tokens:
                turn.copy(self._cache)

    def _note_uses(self) -> None:
        for row, use in self._cache.snapshots.take_uses().items():
            for sequence in self._open.of_rows(np.array([row])):
                self._deltas.use_snapshots(sequence, use)
