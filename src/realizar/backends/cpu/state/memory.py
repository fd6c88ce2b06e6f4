"""`StateMemory`: the states of rows and snapshots, and the tokens after them that may be undone.

A row's live state is what its layers keep after the tokens that are certain. The tokens after those, at most the drafts
of a step and the one before them, lie in the row's replay buffer as what each of them does to the state. A step of the
row may begin after any of them: kernels first apply those that come before it, then go on with the step's own tokens.
That is the same arithmetic in the same order as if the refused ones had never been there, so drafts, rows that were
deferred, chunks and batches all leave the same bits.

A kernel does, for each row of a step, in this order (fields of `state/rows.py`; L is its part of the row's live state,
R its part of the replay buffer):

1. state = zeros if IS_NEW, else L, then the first REPLAYED tokens of R applied to it.
2. The first TOKENS - UNCERTAIN tokens of the step applied to it; their outputs.
3. L = state. (Where nothing was applied, nothing changes.)
4. The last UNCERTAIN tokens: outputs from a state that goes on and is dropped; what each does goes into R, from its
   beginning on.

The state of a slot, all layers after one another, is one run of memory: a snapshot is one copy. Slots 0 to max_rows - 1
are rows, the others snapshots. Memory is reserved; the system takes it as slots are first written. Host snapshots are
memory of the same kind here, with a bound of its own: the twin of what a GPU keeps beside its own memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from realizar.backends.cpu.records import address, aligned_zeros
from realizar.backends.cpu.state.rows import FIRST, IS_NEW, REPLAYED, SLOT, STATE_ROW_FIELDS, TOKENS, UNCERTAIN
from realizar.backends.cpu.state.sizes import StateSizes
from realizar.batch import NO_MOVES, StateMoves, StepRows

_FETCHES = 5  # to know how long one takes
_Column = NDArray[np.int64]


class StateMemory:
    """States of a model's layers.

    Attributes:
        num_snapshots: slots beside those of rows. num_host_snapshots: those to which snapshots are moved.
        rows: int64 [max_rows, STATE_ROW_FIELDS] (`state/rows.py`), of the step that begins.
    """

    def __init__(self, sizes: StateSizes, max_rows: int, num_snapshots: int, num_host_snapshots: int = 0) -> None:
        self.sizes, self.num_snapshots, self._max_rows = sizes, num_snapshots, max_rows
        self.num_host_snapshots, floats = num_host_snapshots, sizes.slot_bytes // 4
        self._host = aligned_zeros((num_host_snapshots, floats), np.float32)
        layers = sizes.layers.values()
        starts = np.cumsum([0, *(4 * layer.state for layer in layers)])
        self._state_at = dict(zip(sizes.layers, starts.tolist(), strict=False))
        starts = np.cumsum([0, *(4 * sizes.most_uncertain * layer.replay for layer in layers)])
        self._replay_at = dict(zip(sizes.layers, starts.tolist(), strict=False))
        self._slots = aligned_zeros((max_rows + num_snapshots, floats), np.float32)
        self._replays = aligned_zeros(max_rows * sizes.replay_bytes, np.uint8)
        self.rows = aligned_zeros((max_rows, STATE_ROW_FIELDS), np.int64)
        self._seen: _Column = np.zeros(max_rows, np.int64)  # tokens that a row's live state has seen
        self._kept: _Column = np.zeros(max_rows, np.int64)  # tokens of its replay buffer

    def state_address(self, layer: int) -> int:
        """The address of a layer's part of slot 0; those of later slots are `sizes.slot_bytes` apart."""
        return address(self._slots) + self._state_at[layer]

    def replay_address(self, layer: int) -> int:
        """That of row 0's; later rows are `sizes.replay_bytes` apart, tokens 4 * `LayerState.replay` bytes."""
        return address(self._replays) + self._replay_at[layer]

    @property
    def size_bytes(self) -> int:
        return int(self._slots.nbytes + self._replays.nbytes + self._host.nbytes)

    @property
    def snapshots(self) -> NDArray[np.uint8]:
        """uint8 [snapshots, bytes]."""
        return self._slots[self._max_rows :].view(np.uint8)

    def begin(self, columns: StepRows, moves: StateMoves) -> None:
        """Make the copies with which a step begins, and write the rows of the step that is to run now.

        Raises RuntimeError: a row goes on from a position that neither its state nor its replay buffer has, or more of
        its tokens are uncertain than it has, or than there is room for.
        """
        numbers, positions = columns.numbers, columns.num_computed_tokens.astype(np.int64)
        if not self.sizes.layers:
            return
        if moves is not NO_MOVES:
            self._move(columns, moves)
        counts, uncertain = columns.num_tokens, columns.num_uncertain
        replayed = np.where(positions == 0, 0, positions - self._seen[numbers])
        computed = counts > 0
        wrong = (replayed < 0) | (replayed > self._kept[numbers])
        wrong |= (uncertain > counts) | (uncertain > self.sizes.most_uncertain)
        if (wrong & computed).any():
            index = int((wrong & computed).argmax())
            raise RuntimeError(
                f"row {numbers[index]} goes on at {positions[index]} with {counts[index]} tokens, {uncertain[index]}"
                f" uncertain, and its state has {self._seen[numbers[index]]} and {self._kept[numbers[index]]} after it"
            )
        rows = self.rows[: len(columns)]
        rows[:, FIRST], rows[:, TOKENS], rows[:, SLOT] = columns.starts[:-1], counts, numbers
        rows[:, IS_NEW], rows[:, REPLAYED], rows[:, UNCERTAIN] = positions == 0, replayed, uncertain
        if not computed.all():
            numbers, positions = numbers[computed], positions[computed]
            counts, uncertain = counts[computed], uncertain[computed]
        self._seen[numbers] = positions + counts - uncertain
        self._kept[numbers] = uncertain

    def time_fetch(self) -> float:
        """Seconds in which a host snapshot becomes the state of row 0, which is lost; the middle of some."""
        seconds = []
        for _ in range(_FETCHES):
            start_s = time.perf_counter()
            self._slots[0] = self._host[0]
            seconds.append(time.perf_counter() - start_s)
        return sorted(seconds)[_FETCHES // 2]

    def take(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy rows to snapshots, as a step ends with; RuntimeError: tokens of a row are uncertain."""
        for row, snapshot in pairs:
            if self._kept[row]:
                raise RuntimeError(
                    f"a snapshot of row {row} is wanted, and {self._kept[row]} of its tokens are uncertain"
                )
            self._slots[self._max_rows + snapshot] = self._slots[row]

    def assume(self, columns: StepRows) -> None:
        """Let the rows of a step begin where it says, whatever their states are: steps are repeated to be measured."""
        self._seen[columns.numbers], self._kept[columns.numbers] = columns.num_computed_tokens, 0

    def _move(self, columns: StepRows, moves: StateMoves) -> None:
        for snapshot, host_snapshot in moves.stored:
            self._host[host_snapshot] = self._slots[self._max_rows + snapshot]
        for row, host_snapshot in moves.fetched:
            self._slots[row] = self._host[host_snapshot]
        for row, snapshot in moves.restored:
            self._slots[row] = self._slots[self._max_rows + snapshot]
        position_of = dict(zip(columns.numbers.tolist(), columns.num_computed_tokens.tolist(), strict=True))
        for row in moves.begun:
            self._seen[row], self._kept[row] = position_of[row], 0
        self.take(moves.kept)
