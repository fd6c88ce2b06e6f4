"""`GrowingDeltas`: what steps give choices, until the engine hands it out as `StepDeltas`."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from realizar.logprob_columns import LogprobColumns, StepEntry
from realizar.outputs import NO_SNAPSHOTS, FinishReason, RowError, SnapshotUse, TokenLogprobs
from realizar.scheduler.row_table import Sequence
from realizar.step_deltas import ChoiceEnd, ChoiceSnapshots, ChoiceStart, RequestFailure, StepDeltas, StepLogprobs

_Entries: TypeAlias = tuple[int, ListOf[TokenLogprobs]]  # with the choice's number
_Parts: TypeAlias = tuple[list[int], LogprobColumns]  # a token of each choice


@dataclass(slots=True)
class _Gained:
    """The parts of the next `StepDeltas`."""

    numbers: list[NDArray[np.int64]] = field(default_factory=list)
    token_ids: list[NDArray[np.int32]] = field(default_factory=list)
    starts: list[ChoiceStart] = field(default_factory=list)
    snapshots: list[ChoiceSnapshots] = field(default_factory=list)
    logprobs: list[_Entries | _Parts] = field(default_factory=list)
    prompt_logprobs: list[_Entries] = field(default_factory=list)
    ends: list[ChoiceEnd] = field(default_factory=list)
    failures: list[RequestFailure] = field(default_factory=list)
    ended: dict[int, str] = field(default_factory=dict)  # request ids, by number


class GrowingDeltas:
    """A choice's number is the id of its sequence. `now_s` is the time of what is added, of the scheduler's clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._gained = _Gained()
        self._new: dict[int, Sequence] = {}  # of which nothing was handed out yet, by number
        self.ended: dict[int, str] = {}  # request ids of the choices whose ends were handed out last, by number

    def open(self, sequence: Sequence) -> None:
        self._new[sequence.sequence_id] = sequence

    def close(self, sequence: Sequence) -> None:
        self._new.pop(sequence.sequence_id, None)

    def use_snapshots(self, sequence: Sequence, use: SnapshotUse) -> None:
        sequence.snapshots = SnapshotUse.total((sequence.snapshots, use))
        if sequence.sequence_id not in self._new:
            self._gained.snapshots.append(ChoiceSnapshots(sequence.sequence_id, sequence.snapshots))

    def add_tokens(self, numbers: NDArray[np.int64], token_ids: NDArray[np.int32]) -> None:
        """New tokens of open choices: int64 [tokens] and int32 [tokens]."""
        for number in sorted(self._new.keys() & numbers.tolist()) if self._new else ():
            self._start(self._new[number])
        self._gained.numbers.append(numbers)
        self._gained.token_ids.append(token_ids)

    def add_logprobs(self, number: int, entries: ListOf[TokenLogprobs]) -> None:
        """Of each of a choice's new tokens."""
        self._gained.logprobs.append((number, entries))

    def add_step_logprobs(self, numbers: NDArray[np.int64], columns: LogprobColumns) -> None:
        """Of one new token of each of these choices."""
        if len(numbers):
            self._gained.logprobs.append((numbers.tolist(), columns))

    def add_prompt_logprobs(self, sequence: Sequence, entries: ListOf[TokenLogprobs]) -> None:
        self._start(sequence)
        self._gained.prompt_logprobs.append((sequence.sequence_id, entries))

    def end(self, sequence: Sequence, reason: FinishReason, pooled: NDArray[np.float32] | None = None) -> None:
        """The end of a choice; a stop token is the last that it has gained."""
        number = sequence.sequence_id
        self._start(sequence)
        stop_token_id = int(sequence.token_ids[-1]) if reason == "stop" else None
        values = None if pooled is None else tuple(pooled.tolist())
        self._gained.ends.append(ChoiceEnd(number, reason, stop_token_id, values, sequence.drafts))
        self._gained.ended[number] = sequence.request.request_id

    def fail(self, sequence: Sequence, error: RowError) -> None:
        """The end of a whole request, named by one of its choices."""
        self._start(sequence)
        self._gained.failures.append(RequestFailure(sequence.sequence_id, error))

    def take(self) -> StepDeltas:
        """Hand out what choices gained since the last call."""
        gained, self._gained = self._gained, _Gained()
        self.ended = gained.ended
        return StepDeltas(
            produced_s=self.now_s,
            numbers=b"".join([part.tobytes() for part in gained.numbers]),
            token_ids=b"".join([part.tobytes() for part in gained.token_ids]),
            starts=tuple(gained.starts),
            snapshots=tuple(gained.snapshots),
            logprobs=_by_width(gained.logprobs),
            prompt_logprobs=_by_width(gained.prompt_logprobs),
            ends=tuple(gained.ends),
            failures=tuple(gained.failures),
        )

    def _start(self, sequence: Sequence) -> None:
        number = sequence.sequence_id
        if self._new.pop(number, None) is not None:
            request, started_s = sequence.request, sequence.scheduled_s
            started_s = self.now_s if started_s is None else started_s
            start = ChoiceStart(number, request.request_id, sequence.choice, started_s, sequence.num_cached_tokens)
            self._gained.starts.append(start)
            if sequence.snapshots is not NO_SNAPSHOTS:
                self._gained.snapshots.append(ChoiceSnapshots(number, sequence.snapshots))


def _by_width(listed: ListOf[_Entries | _Parts]) -> tuple[StepLogprobs, ...]:
    """The log-probabilities of choices, those together that list equally many ids."""
    if not listed:
        return ()
    groups: dict[int, tuple[list[int], list[LogprobColumns]]] = {}
    for _, run in itertools.groupby(listed, lambda each: id(_step_of(each[1]))):
        for of_part, columns in _columns_of(list(run)):
            of_width, of_columns = groups.setdefault(columns.width, ([], []))
            of_width.extend(of_part)
            of_columns.append(columns)
    return tuple(
        StepLogprobs(array("q", numbers).tobytes(), LogprobColumns.joined(parts)) for numbers, parts in groups.values()
    )


def _columns_of(run: list[_Entries | _Parts]) -> list[_Parts]:
    """The columns of entries that lie in those of one step, or lie apart, with the choice of each token."""
    step = _step_of(run[0][1])
    if step is not None:
        numbers = [number for number, _ in run if isinstance(number, int)]
        return [(numbers, step.picked([entry.at for _, entry in run if isinstance(entry, StepEntry)]))]
    return [
        ([number] * len(entries) if isinstance(number, int) else number, LogprobColumns.of(entries))
        for number, entries in run
    ]


def _step_of(entries: ListOf[TokenLogprobs]) -> LogprobColumns | None:
    """The columns of the step that a single entry lies in; None for entries by themselves."""
    return entries.columns if type(entries) is StepEntry else None
