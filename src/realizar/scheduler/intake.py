"""`Intake`: takes in the results of a step, those of plain rows all at once and any other row by itself."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from realizar.batch import NO_CHOICE, RowOutput, ScheduledRow, StepOutput, StepRows
from realizar.kv_cache.manager import KVCacheManager
from realizar.outputs import FinishReason, RowError, TokenOutput
from realizar.scheduler.drafting import Drafting
from realizar.scheduler.open_sequences import OpenSequences
from realizar.scheduler.results import plain_output, token_output
from realizar.scheduler.row_table import RowTable, TakenIn
from realizar.scheduler.sequence import Gain, Sequence

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Choices:
    """The choices of plain rows that were appended to them. Rows are named by their index in the step.

    Attributes:
        plain: bool [rows], true for these rows.
        gained: of every row, the choices that it keeps if it is plain.
        stopped, full: those that end with their last choice, a stop id or the last that is wanted.
        need_care: those that end, or have filled a block.
    """

    plain: NDArray[np.bool_]
    gained: list[tuple[int, ...]]
    stopped: frozenset[int]
    full: frozenset[int]
    need_care: list[int]


class Intake:
    """Part of a scheduler.

    Args:
        end: ends a sequence that has all its tokens.
        fail: ends the whole request of a sequence, by its number, and returns its last output.
    """

    def __init__(
        self,
        open_sequences: OpenSequences,
        table: RowTable,
        cache: KVCacheManager,
        drafting: Drafting,
        end: Callable[[Sequence, float], None],
        fail: Callable[[int, RowError], TokenOutput | None],
    ) -> None:
        self._open, self._table, self._cache, self._drafting = open_sequences, table, cache, drafting
        self._end, self._fail = end, fail

    def take_in(self, rows: StepRows, output: StepOutput, now_s: float) -> list[TokenOutput]:
        """The outputs of a step's rows, in their order; results of sequences that have ended are dropped.

        Raises:
            RuntimeError: the results are those of other rows.
        """
        _check_rows(rows, output)
        is_open = self._table.sequence_ids[rows.numbers] == rows.sequence_ids
        is_open &= ~_have_nothing(rows, output)
        owners = [self._open.in_rows[row] for row in rows.numbers.tolist()]
        choices = self._append(rows, output, is_open, owners)
        others, logprobs = output.others, output.logprobs
        if not choices.need_care and not others and np.count_nonzero(choices.plain) == len(owners):
            each = enumerate(zip(owners, choices.gained, strict=True))
            return [
                plain_output(owner, gained, now_s, logprobs.get(index, ()))
                for index, (owner, gained) in each
                if owner is not None
            ]
        by_themselves = (is_open & ~choices.plain).nonzero()[0].tolist()
        settled: dict[int, TokenOutput | None] = {}
        failed: dict[str, int] = {}  # index of the row with which a request failed
        for index in sorted([*by_themselves, *choices.need_care]):
            settled[index] = found = self._settle(index, rows, output, choices, now_s)
            if found is not None and found.error is not None:
                failed[found.request_id] = index
        outputs: list[TokenOutput] = []
        for index in is_open.nonzero()[0].tolist():
            owner = owners[index]
            if index in settled:
                found = settled[index]
                if found is not None:
                    outputs.append(found)
            elif owner is not None and not (failed and failed.get(owner.request.request_id, index) < index):
                gained, result = choices.gained[index], others.get(index)
                if result is None:
                    outputs.append(plain_output(owner, gained, now_s, logprobs.get(index, ())))
                elif len(result.logprobs) == len(gained) and not result.queried:
                    outputs.append(plain_output(owner, gained, now_s, result.logprobs))
                elif (found := token_output(owner, Gain(gained), result, now_s)) is not None:
                    outputs.append(found)
        return outputs

    def _append(
        self, rows: StepRows, output: StepOutput, is_open: NDArray[np.bool_], owners: ListOf[Sequence | None]
    ) -> _Choices:
        """Append the choices of plain rows to them."""
        table, numbers, choices = self._table, rows.numbers, output.choices
        plain = is_open & table.is_plain[numbers] & (choices[:, 0] != NO_CHOICE)
        if not rows.only_decodes:
            plain &= rows.samples
        if output.others:
            plain &= ~_after_a_failure(output, is_open, owners)
        where = plain.nonzero()[0]
        if not len(where):
            return _Choices(plain, [], frozenset(), frozenset(), [])
        are_all = len(where) == len(numbers)
        those = numbers if are_all else numbers[where]
        gained: list[tuple[int, ...]]
        if choices.shape[1] == 1:
            taken = table.take_in(those, choices[:, 0] if are_all else choices[where, 0])
            gained = [(token_id,) for token_id in choices[:, 0].tolist()]
        else:
            taken = table.take_in_several(those, choices[where])
            gained = _first_of_each(choices, where, taken)
        if not rows.only_decodes:
            self._settle_drafts(rows, output, where, owners)
        need_care = taken.stopped | taken.full
        if self._cache.prefix_cache:
            need_care |= self._cache.have_new_blocks(those, table.num_known[those], table.num_computed[those])
        if not np.count_nonzero(need_care):
            return _Choices(plain, gained, frozenset(), frozenset(), [])
        return _Choices(
            plain,
            gained,
            stopped=frozenset(where[taken.stopped].tolist()),
            full=frozenset(where[taken.full].tolist()),
            need_care=where[need_care].tolist(),
        )

    def _settle_drafts(
        self, rows: StepRows, output: StepOutput, where: NDArray[np.intp], owners: ListOf[Sequence | None]
    ) -> None:
        """Count the drafts of some rows, by their index, as verified; those that were wrong are computed no more."""
        drafted = where[rows.num_drafts[where] > 0]
        if not len(drafted):
            return
        num_choices = output.num_choices[drafted]
        computed = rows.num_computed_tokens[drafted] + num_choices
        self._table.settle_drafts(rows.numbers[drafted], computed)
        sequences = [owner for index in drafted.tolist() if (owner := owners[index]) is not None]
        self._drafting.verified(sequences, rows.num_drafts[drafted].tolist(), (num_choices - 1).tolist())

    def _settle(
        self, index: int, rows: StepRows, output: StepOutput, choices: _Choices, now_s: float
    ) -> TokenOutput | None:
        """Take in one row's results and make its request's output; an exception here ends this request alone."""
        sequence = self._open.get(int(rows.sequence_ids[index]))
        if sequence is None:
            return None  # its request failed with an earlier row
        result = output.row(index)
        if result.error is not None:
            return self._fail(sequence.sequence_id, result.error)
        try:
            if choices.plain[index]:
                gain = _gain(choices.gained[index], index in choices.stopped, index in choices.full)
                self._register(sequence)
            else:
                gain = self._gain_of_row(sequence, rows.row(index), result)
            settled = token_output(sequence, gain, result, now_s)
        except Exception as error:  # noqa: BLE001 - one request's tokens are not the others' trouble
            _LOG.exception("the tokens of %s could not be taken in", sequence.request.request_id)
            return self._fail(sequence.sequence_id, RowError.of(error, "tokens"))
        if gain.finish_reason is not None:
            self._end(sequence, now_s)
        return settled

    def _gain_of_row(self, sequence: Sequence, scheduled: ScheduledRow, result: RowOutput) -> Gain:
        if scheduled.sample:
            return self._gain_of_choices(sequence, scheduled, result.token_ids)
        end = scheduled.num_computed_tokens + scheduled.num_tokens
        ended = sequence.request.max_tokens == 0 and end == sequence.num_prompt_tokens
        return Gain((), "length" if ended else None)

    def _gain_of_choices(self, sequence: Sequence, scheduled: ScheduledRow, token_ids: tuple[int, ...]) -> Gain:
        """Choices of a step: drafts that were wrong are computed no more. A row that was held has none."""
        if not token_ids:
            return Gain(())
        num_drafts, num_accepted = scheduled.num_drafts, len(token_ids) - 1
        sequence.num_pending -= 1
        if num_drafts:
            sequence.num_drafts = 0
            self._drafting.verified([sequence], [num_drafts], [num_accepted])
            sequence.num_computed_tokens = scheduled.num_computed_tokens + len(token_ids)
        gain = sequence.take_in(token_ids)
        self._register(sequence)
        return gain

    def _register(self, sequence: Sequence) -> None:
        """Let the full blocks of a sequence that goes on from a choice be found."""
        if sequence.running:
            self._cache.register(sequence.own_row, sequence.keys, sequence.token_ids, sequence.num_computed_tokens)


def _have_nothing(rows: StepRows, output: StepOutput) -> NDArray[np.bool_]:
    """bool [rows]: rows that were held, and have no result beside."""
    found: NDArray[np.bool_] = rows.samples & (output.choices[:, 0] == NO_CHOICE)
    found[list(output.others)] = False
    return found


def _after_a_failure(
    output: StepOutput, is_open: NDArray[np.bool_], owners: ListOf[Sequence | None]
) -> NDArray[np.bool_]:
    """bool [rows]: rows of a request that fails with an earlier row, of which nothing is taken in."""
    found = np.zeros(len(owners), np.bool_)
    failed: dict[str, int] = {}
    for index in sorted(index for index, row in output.others.items() if row.error is not None):
        owner = owners[index]
        if owner is not None and is_open[index]:
            failed.setdefault(owner.request.request_id, index)
    if failed:
        for index, owner in enumerate(owners):
            found[index] = owner is not None and failed.get(owner.request.request_id, index) < index
    return found


def _first_of_each(choices: NDArray[np.int32], where: NDArray[np.intp], taken: TakenIn) -> list[tuple[int, ...]]:
    """The choices that rows keep, of which the rows `where` were taken in; none of any other row."""
    counts = np.zeros(len(choices), np.intp)
    counts[where] = 1 if taken.counts is None else taken.counts
    return [tuple(token_ids[:count]) for token_ids, count in zip(choices.tolist(), counts.tolist(), strict=True)]


def _check_rows(rows: StepRows, output: StepOutput) -> None:
    if not np.array_equal(rows.numbers, output.numbers):
        pairs = itertools.zip_longest(rows.numbers.tolist(), output.numbers.tolist())
        row, answered = next((row, answered) for row, answered in pairs if row != answered)
        raise RuntimeError(f"the backend answered for row {answered} in place of row {row}")


def _gain(token_ids: tuple[int, ...], stopped: bool, full: bool) -> Gain:
    """The gain of a row whose choices were appended with all others."""
    reason: FinishReason | None = "stop" if stopped else "length" if full else None
    return Gain(token_ids, reason, token_ids[-1] if stopped else None)
