"""`RowTable`: the state of all sequences that have a row, one column for each fact, indexed by the row's number.

A step of many decodes reads and writes these columns with a few operations for all its rows. `Sequence` shows the same
numbers for one sequence, so that nothing is held twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from realizar.batch import FROM_PREVIOUS_STEP, NO_CHOICE, StepRows

MOST_STOP_IDS = 16  # of a row that is compared with them beside the others; a row with more is taken in by itself
_NOBODY = -1  # in place of the number of a sequence
_NO_ID = -1  # in place of a stop id
_LARGEST = 2**31 - 1  # of an int32

Rows = NDArray[np.intp]
Column = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TakenIn:
    """The rows whose choices end with the tokens taken in. All are [rows].

    Attributes:
        stopped: the last choice is a stop id, and late enough to be one.
        full: no further token is wanted.
        counts: choices of each row that were appended; None where it is one of each.
    """

    stopped: NDArray[np.bool_]
    full: NDArray[np.bool_]
    counts: NDArray[np.intp] | None = None


class RowTable:
    """The columns.

    Attributes:
        sequence_ids: int64 [rows], the scheduler's number of the sequence in each row, -1 where there is none.
        token_ids: int32 [rows, context], prompt and output as far as known; memory is used as it is written.
        num_known: int32 [rows], how many of them are known.
        num_pending: int32 [rows], choices of submitted steps that are not known yet, drafts apart.
        num_computed: int32 [rows], tokens in the KV cache once every submitted step is done, drafts in flight included.
        num_drafts: int32 [rows], drafts in flight.
        num_proposed: int32 [rows], drafts that wait to be scheduled.
        most_tokens: int32 [rows], the number of tokens at which no further choice is wanted.
        least_tokens: int32 [rows], the number of tokens up to which stop ids do not end the row.
        is_plain: bool [rows], the row chooses tokens, nothing else is wanted of it, and it has few stop ids.
        stop_ids: int32 [rows, MOST_STOP_IDS] of plain rows, -1 where a row has fewer.
        may_repeat: int32 [rows], 1 where the token before a choice may be computed again and the model has a state.

    Args:
        has_state: the model has one.
    """

    def __init__(self, num_rows: int, context_length: int, *, has_state: bool = False) -> None:
        self._has_state = has_state
        self.sequence_ids = np.full(num_rows, _NOBODY, np.int64)
        self.token_ids = np.zeros((num_rows, context_length), np.int32)
        self.num_known = np.zeros(num_rows, np.int32)
        self.num_pending = np.zeros(num_rows, np.int32)
        self.num_computed = np.zeros(num_rows, np.int32)
        self.num_drafts = np.zeros(num_rows, np.int32)
        self.num_proposed = np.zeros(num_rows, np.int32)
        self.most_tokens = np.zeros(num_rows, np.int32)
        self.least_tokens = np.zeros(num_rows, np.int32)
        self.is_plain = np.zeros(num_rows, np.bool_)
        self.stop_ids = np.full((num_rows, MOST_STOP_IDS), _NO_ID, np.int32)
        self.may_repeat = np.zeros(num_rows, np.int32)

    def open(
        self, row: int, sequence_id: int, token_ids: NDArray[np.int32], *, most_tokens: int, least_tokens: int,
        stop_ids: frozenset[int] | None, may_be_held: bool = False,
    ) -> None:  # fmt: skip
        """Give a row to a sequence of which nothing is computed.

        Args:
            token_ids: int32 [tokens], all that are known.
            least_tokens: may be more than any row ever has.
            stop_ids: of a plain row, of any value; None for any other.
            may_be_held: the row follows a grammar (`scheduler/holding.py`).
        """
        self.sequence_ids[row] = sequence_id
        self.token_ids[row, : len(token_ids)] = token_ids
        self.num_known[row] = len(token_ids)
        for column in (self.num_pending, self.num_computed, self.num_drafts, self.num_proposed):
            column[row] = 0
        self.may_repeat[row] = may_be_held and self._has_state
        self.most_tokens[row], self.least_tokens[row] = most_tokens, min(least_tokens, _LARGEST)
        usable = [token_id for token_id in stop_ids or () if 0 <= token_id <= _LARGEST]
        self.is_plain[row] = stop_ids is not None and len(usable) <= MOST_STOP_IDS
        if self.is_plain[row]:
            self.stop_ids[row] = _NO_ID
            self.stop_ids[row, : len(usable)] = usable

    def close(self, row: int) -> None:
        """Take the row from its sequence: results of submitted steps are nobody's."""
        self.sequence_ids[row] = _NOBODY

    def num_remaining(self, rows: Rows) -> Column:
        """Tokens to compute for each row's next choice; 0 when none is wanted, or drafts must be verified first."""
        num_tokens = self.num_known[rows] + self.num_pending[rows]
        remaining = num_tokens - self.num_computed[rows]
        remaining[num_tokens >= self.most_tokens[rows]] = 0
        remaining[self.num_drafts[rows].astype(np.bool_)] = 0
        return remaining

    def go_on(self, step: StepRows) -> NDArray[np.bool_]:
        """bool [rows]: rows of a step whose sequence has its last token known, alone to compute, and room for a draft.

        A preempted sequence may be among them.
        """
        rows = step.numbers
        known, room = self.num_known[rows], self.most_tokens[rows] - 1 > self.num_known[rows]
        is_open = self.sequence_ids[rows] == step.sequence_ids
        waits = (self.num_pending[rows] == 0) & (self.num_drafts[rows] == 0)
        found: NDArray[np.bool_] = is_open & room & waits & (known - self.num_computed[rows] == 1)
        return found

    def have_one_result(self, rows: Rows) -> bool:
        """True if all rows are plain and none has drafts to be scheduled: a decode of each gives one choice."""
        return np.count_nonzero(self.is_plain[rows]) == len(rows) and not np.count_nonzero(self.num_proposed[rows])

    def advance(self, rows: Rows) -> StepRows:
        """Schedule the one token that each row has to compute, and the choice after it; it counts as computed."""
        computed = self.num_computed[rows]
        token_ids = self.token_ids[rows, computed]
        token_ids[computed >= self.num_known[rows]] = FROM_PREVIOUS_STEP
        self.num_computed[rows] = computed + 1
        self.num_pending[rows] += 1
        uncertain = self.may_repeat[rows] if self._has_state else None
        return StepRows.of_decodes(self.sequence_ids[rows], rows, computed, token_ids, uncertain)

    def computed_again(self, step: StepRows, rows: NDArray[np.bool_]) -> StepRows:
        """The step, in which some decodes, bool [rows], compute the last known token of their row."""
        numbers, places = step.numbers[rows], step.starts[:-1][rows]
        token_ids, computed = step.token_ids.copy(), step.num_computed_tokens.copy()
        token_ids[places] = self.token_ids[numbers, self.num_known[numbers] - 1]
        computed[rows] -= 1
        return replace(step, token_ids=token_ids, num_computed_tokens=computed)

    def advance_with_drafts(self, rows: Rows, drafts: Sequence[tuple[int, ...]], num_drafts: Column) -> StepRows:
        """Schedule the one token that each row has to compute, its drafts, so many of each, and the choices."""
        computed, counts = self.num_computed[rows], num_drafts + np.int32(1)
        starts = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        own = self.token_ids[rows, computed]
        own[computed >= self.num_known[rows]] = FROM_PREVIOUS_STEP
        are_drafts = np.ones(starts[-1], np.bool_)
        are_drafts[starts[:-1]] = False
        token_ids = np.empty(starts[-1], np.int32)
        token_ids[starts[:-1]] = own
        token_ids[are_drafts] = list(itertools.chain.from_iterable(drafts))
        self.num_computed[rows] = computed + counts
        self.num_pending[rows] += 1
        self.num_drafts[rows] = num_drafts
        samples = np.ones(len(rows), np.bool_)
        uncertain = num_drafts + self.may_repeat[rows] if self._has_state else num_drafts
        return StepRows(self.sequence_ids[rows], rows, computed, token_ids, starts, samples, num_drafts, uncertain)

    def take_in(self, rows: Rows, choices: Column) -> TakenIn:
        """Append one choice to each row."""
        places = self.num_known[rows]
        self.token_ids[rows, places] = choices
        known = places + 1
        self.num_known[rows] = known
        self.num_pending[rows] -= 1
        stopped = (self.stop_ids.take(rows, axis=0) == choices[:, None]).any(axis=1) & (known > self.least_tokens[rows])
        return TakenIn(stopped, known >= self.most_tokens[rows])

    def take_in_several(self, rows: Rows, choices: NDArray[np.int32]) -> TakenIn:
        """Append choices to each row up to the one that ends it.

        Args:
            choices: int32 [rows, 1 + drafts], at least one of each row, NO_CHOICE after its last.
        """
        places, each = self.num_known[rows], np.arange(choices.shape[1], dtype=np.int32)
        chosen = choices != NO_CHOICE
        known = places[:, None] + (each + np.int32(1))  # tokens with each choice
        stops = (self.stop_ids[rows][:, None, :] == choices[:, :, None]).any(axis=2)
        stops &= chosen & (known > self.least_tokens[rows][:, None])
        full = chosen & (known >= self.most_tokens[rows][:, None])
        ends = stops | full
        counts = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, np.count_nonzero(chosen, axis=1))
        index, place = (each < counts[:, None]).nonzero()
        self.token_ids[rows[index], places[index] + place] = choices[index, place]
        self.num_known[rows] = places + counts
        self.num_pending[rows] -= 1
        last = np.arange(len(rows)), counts - 1
        return TakenIn(stops[last], full[last], counts)

    def settle_drafts(self, rows: Rows, num_computed: NDArray[np.intp]) -> None:
        """Drafts of these rows are in flight no more; so many tokens of each, intp [rows], stay computed."""
        self.num_drafts[rows] = 0
        self.num_computed[rows] = num_computed
