"""States of rows for the scripted backend: a hash of every token that a row has absorbed, in order.

They follow the rules of `Backend.submit` for models with states. A row's live state has seen its certain tokens alone;
its uncertain ones are kept and absorbed again where the next step begins after them. A snapshot that is restored at a
wrong place, a stale one, or a refused token in a state changes the tokens that follow, or raises.
"""

from __future__ import annotations

from collections.abc import Sequence

from realizar.batch import StateMoves
from step_inputs import ScheduledRow

START = 0x5EED
_MASK = (1 << 64) - 1


def absorb(state: int, token_id: int, position: int) -> int:
    """The state after one more token."""
    state = ((state ^ (token_id * 1_000_003 + position)) * 0xBF58476D1CE4E5B9) & _MASK
    return state ^ (state >> 31)


def states_of(token_ids: Sequence[int]) -> list[int]:
    """The state after each token of a history."""
    states = [START]
    for position, token_id in enumerate(token_ids):
        states.append(absorb(states[-1], token_id, position))
    return states[1:]


class ScriptedStates:
    """The memory of states: a live one for each row, and snapshots.

    Args:
        num_snapshots: that there is memory for. num_host_snapshots: in the host's memory.
        block_size: tokens per block, at whose ends snapshots are taken.
    """

    def __init__(self, num_snapshots: int, block_size: int, num_host_snapshots: int = 0) -> None:
        self._num_snapshots, self._block_size = num_snapshots, block_size
        self._num_host_snapshots = num_host_snapshots
        self._host: dict[int, tuple[int, int]] = {}
        self._live: dict[int, tuple[int, int]] = {}  # by row: the state, and how many tokens it has seen
        self._replayed: dict[int, list[int]] = {}  # by row: the tokens after those
        self._snapshots: dict[int, tuple[int, int]] = {}

    def restore(self, moves: StateMoves) -> None:
        """Begin a step."""
        for snapshot, host_snapshot in moves.stored:
            assert 0 <= host_snapshot < self._num_host_snapshots, f"there is no host snapshot {host_snapshot}"
            self._host[host_snapshot] = self._snapshots[snapshot]
        for row, host_snapshot in moves.fetched:
            self._live[row], self._replayed[row] = self._host[host_snapshot], []
        for row, snapshot in moves.restored:
            self._live[row], self._replayed[row] = self._snapshots[snapshot], []
        for row, snapshot in moves.kept:
            self._snapshots[snapshot] = self._live[row]
        stored = [host_snapshot for _, host_snapshot in moves.stored]
        assert len({*stored}) == len(stored), "two snapshots go to one place"
        assert not {*stored} & {host_snapshot for _, host_snapshot in moves.fetched}, "one comes as another goes there"

    def advance(self, row: ScheduledRow, token_ids: Sequence[int]) -> list[int]:
        """The state after each of a row's tokens."""
        start = row.num_computed_tokens
        if start == 0:
            self._live[row.row], self._replayed[row.row] = (START, 0), []
        state, seen = self._live[row.row]
        replayed = self._replayed[row.row][: start - seen]
        assert len(replayed) == start - seen, f"the state of row {row.row} has seen {seen} tokens, not {start}"
        for position, token_id in enumerate(replayed, seen):
            state = absorb(state, token_id, position)
        states = [state]
        for position, token_id in enumerate(token_ids, start):
            states.append(absorb(states[-1], token_id, position))
        certain = len(token_ids) - row.num_uncertain
        assert certain >= 0, "more tokens are uncertain than there are"
        self._live[row.row] = states[certain], start + certain
        self._replayed[row.row] = list(token_ids[certain:])
        return states[1:]

    def take(self, moves: StateMoves, rows: Sequence[ScheduledRow]) -> None:
        """End a step over these rows."""
        in_step = {row.row: row for row in rows}
        for row, snapshot in moves.taken:
            assert 0 <= snapshot < self._num_snapshots, f"there is no snapshot {snapshot}"
            assert not in_step[row].num_uncertain, "a snapshot of what may be undone"
            assert self._live[row][1] % self._block_size == 0, "a snapshot within a block"
            self._snapshots[snapshot] = self._live[row]
        named = [snapshot for _, snapshot in (*moves.kept, *moves.taken)]
        assert len({*named}) == len(named), "two rows write one snapshot"
        assert not {*named} & {snapshot for _, snapshot in moves.restored}, "a snapshot is read and written"

    def close(self, row: int) -> None:
        """Forget a row."""
        self._live.pop(row, None)
