"""Records by hand: rows that open, rows of a step and what they get, one by one; a backend's arrays."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from realizar.backends.base import ForwardInput
from realizar.batch import (
    NOT_SAMPLED,
    LogprobQuery,
    OpenedRow,
    ScheduledBatch,
    StepOutput,
    StepRows,
)
from realizar.engine.given_embeddings import prompt_embeddings
from realizar.outputs import NO_DRAFTS, NO_SNAPSHOTS, FinishReason, RowError, SnapshotUse, TokenLogprobs
from realizar.request import Pooling, Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.growing_deltas import GrowingDeltas
from realizar.step_deltas import ChoiceStart, StepDeltas, StepLogprobs


@dataclass(frozen=True)
class ScheduledRow:
    """One row's share of a step; `StepRows` says what the fields mean."""

    sequence_id: int
    row: int
    token_ids: tuple[int, ...]
    num_computed_tokens: int
    sample: bool
    logprob_queries: tuple[LogprobQuery, ...] = ()
    num_drafts: int = 0
    pooling: Pooling | None = None
    num_uncertain: int = 0
    lookahead: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_context_tokens(self) -> int:
        """Tokens of the row after this step, drafts included."""
        return self.num_computed_tokens + len(self.token_ids)

    @property
    def draft_ids(self) -> tuple[int, ...]:
        return self.token_ids[len(self.token_ids) - self.num_drafts :]


@dataclass(frozen=True)
class RowOutput:
    """One row's results; `StepOutput` says what the fields mean."""

    token_ids: tuple[int, ...]
    logprobs: Sequence[TokenLogprobs] = ()
    queried: Sequence[TokenLogprobs] = ()
    pooled: NDArray[np.float32] | None = None
    error: RowError | None = None


def step_rows(rows: Sequence[ScheduledRow]) -> StepRows:
    """The columns of some rows."""
    return StepRows(
        sequence_ids=np.array([row.sequence_id for row in rows], np.int64),
        numbers=np.array([row.row for row in rows], np.intp),
        num_computed_tokens=np.array([row.num_computed_tokens for row in rows], np.int32),
        token_ids=np.array([token_id for row in rows for token_id in row.token_ids], np.int32),
        starts=np.array([0, *itertools.accumulate(row.num_tokens for row in rows)], np.int32),
        samples=np.array([row.sample for row in rows], np.bool_),
        num_drafts=np.array([row.num_drafts for row in rows], np.int32),
        num_uncertain=np.array([row.num_uncertain for row in rows], np.int32),
        logprob_queries={index: row.logprob_queries for index, row in enumerate(rows) if row.logprob_queries},
        pooling={index: row.pooling for index, row in enumerate(rows) if row.pooling is not None},
        lookahead=np.array([row.lookahead for row in rows], np.int32) if any(row.lookahead for row in rows) else None,
    )


def rows_of(step: StepRows | ScheduledBatch | ForwardInput) -> tuple[ScheduledRow, ...]:
    """The rows of a step, in the order of their tokens."""
    columns = step if isinstance(step, StepRows) else step.columns
    return tuple(
        ScheduledRow(
            sequence_id=int(columns.sequence_ids[index]),
            row=int(columns.numbers[index]),
            token_ids=tuple(columns.token_ids[columns.starts[index] : columns.starts[index + 1]].tolist()),
            num_computed_tokens=int(columns.num_computed_tokens[index]),
            sample=bool(columns.samples[index]),
            logprob_queries=columns.logprob_queries.get(index, ()),
            num_drafts=int(columns.num_drafts[index]),
            pooling=columns.pooling.get(index),
            num_uncertain=int(columns.num_uncertain[index]),
            lookahead=0 if columns.lookahead is None else int(columns.lookahead[index]),
        )
        for index in range(len(columns))
    )


def step_output(rows: Iterable[RowOutput]) -> StepOutput:
    """The columns of some rows' results."""
    outputs = list(rows)
    sampled = np.full((len(outputs), max([1, *[len(row.token_ids) for row in outputs]])), NOT_SAMPLED, np.int32)
    for index, row in enumerate(outputs):
        sampled[index, : len(row.token_ids)] = row.token_ids
    return StepOutput(
        sampled,
        logprobs={index: row.logprobs for index, row in enumerate(outputs) if row.logprobs},
        queried={index: row.queried for index, row in enumerate(outputs) if row.queried},
        pooled={index: row.pooled for index, row in enumerate(outputs) if row.pooled is not None},
        errors={index: row.error for index, row in enumerate(outputs) if row.error is not None},
    )


def results_of(output: StepOutput) -> tuple[RowOutput, ...]:
    """The results of a step's rows."""
    return tuple(
        RowOutput(
            token_ids=tuple(output.sampled[index, : output.num_sampled[index]].tolist()),
            logprobs=output.logprobs.get(index, ()),
            queried=output.queried.get(index, ()),
            pooled=output.pooled.get(index),
            error=output.errors.get(index),
        )
        for index in range(len(output.sampled))
    )


def opened_row(
    row: int, sampling: SamplingParams, history: Iterable[int], num_prompt_tokens: int | None = None, choice: int = 0
) -> OpenedRow:
    """A row that opens; its whole history is prompt unless a number is given."""
    tokens = tuple(int(token_id) for token_id in history)
    return OpenedRow(
        row, row, sampling, tokens, len(tokens) if num_prompt_tokens is None else num_prompt_tokens, choice
    )


def scheduled_row(
    row: int,
    token_ids: Iterable[int],
    computed: int = 0,
    sample: bool = False,
    *,
    drafts: Sequence[int] = (),
    **more: Any,
) -> ScheduledRow:
    """A row's share of a step: drafts follow `token_ids`, which follow `computed` others."""
    tokens = (*(int(token_id) for token_id in token_ids), *drafts)
    more = {"num_uncertain": len(drafts), **more}
    return ScheduledRow(row, row, tokens, computed, sample, num_drafts=len(drafts), **more)


def step_input(
    rows: Sequence[ScheduledRow], slots: Sequence[NDArray[np.int32]], tables: Sequence[NDArray[np.int32]]
) -> ForwardInput:
    """A step over these rows, with slots and block tables per cache group."""
    places = [row.num_computed_tokens + index for row in rows for index in range(row.num_tokens)]
    return ForwardInput(step_rows(rows), np.array(places, np.int32), tuple(slots), tuple(tables))


def with_given(
    request: Request, embeddings: NDArray[np.float32], runs: Sequence[tuple[int, int]], placeholder: int | None
) -> Request:
    """The request with embeddings for runs of its prompt's tokens.

    Args:
        embeddings: float32 [prompt tokens, hidden_size]. runs: first token and end of each.
        placeholder: the id under them; None leaves the prompt's ids.
    """
    ids = list(request.prompt_token_ids)
    for start, end in runs:
        ids[start:end] = ids[start:end] if placeholder is None else [placeholder] * (end - start)
    given = tuple(prompt_embeddings(embeddings[start:end], start) for start, end in runs)
    return replace(request, prompt_token_ids=tuple(ids), embeddings=given)


@dataclass
class TokenOutput:
    """What a step gave one choice of a request; `StepDeltas` says what the fields mean."""

    request_id: str
    choice: int
    token_ids: tuple[int, ...]
    scheduled_s: float
    produced_s: float
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    pooled: tuple[float, ...] | None = None
    error: RowError | None = None
    snapshots: SnapshotUse = NO_SNAPSHOTS


class OutputReader:
    """Reads the deltas of all steps of an engine, from its first on, as outputs of choices."""

    def __init__(self) -> None:
        self._starts: dict[int, ChoiceStart] = {}
        self._uses: dict[int, SnapshotUse] = {}

    def read(self, deltas: StepDeltas) -> list[TokenOutput]:
        """One output for each run of a choice's tokens, and one for each choice with something else alone."""
        self._starts |= {start.number: start for start in deltas.starts}
        self._uses |= {each.number: each.use for each in deltas.snapshots}
        found: list[tuple[int, TokenOutput]] = []
        logprobs = {number: iter(entries) for number, entries in _by_number(deltas.logprobs).items()}
        pairs = zip(deltas.number_list(), deltas.token_list(), strict=True)
        for number, run in itertools.groupby(pairs, lambda pair: pair[0]):
            output = self._output(number, deltas.produced_s, tuple(token_id for _, token_id in run))
            output.logprobs = tuple(itertools.islice(logprobs.get(number, iter(())), len(output.token_ids)))
            found.append((number, output))

        def last(number: int) -> TokenOutput:
            outputs = [output for each, output in found if each == number]
            if not outputs:
                outputs.append(self._output(number, deltas.produced_s, ()))
                found.append((number, outputs[0]))
            return outputs[-1]

        for number, entries in _by_number(deltas.prompt_logprobs).items():
            last(number).prompt_logprobs = tuple(entries)
        for end in deltas.ends:
            output = last(end.number)
            output.finish_reason, output.stop_token_id = end.finish_reason, end.stop_token_id
            output.pooled = end.pooled
        for failure in deltas.failures:
            output = self._output(failure.number, deltas.produced_s, ())
            output.error = failure.error
            found.append((failure.number, output))
        return [output for _, output in found]

    def _output(self, number: int, produced_s: float, token_ids: tuple[int, ...]) -> TokenOutput:
        start = self._starts[number]
        return TokenOutput(
            start.request_id, start.choice, token_ids, start.scheduled_s, produced_s,
            num_cached_tokens=start.num_cached_tokens, snapshots=self._uses.get(number, NO_SNAPSHOTS),
        )  # fmt: skip


def _by_number(parts: Sequence[StepLogprobs]) -> dict[int, list[TokenLogprobs]]:
    found: dict[int, list[TokenLogprobs]] = defaultdict(list)
    for part in parts:
        for number, entry in zip(part.number_list(), part.entries, strict=True):
            found[number].append(entry)
    return found


_READERS: WeakKeyDictionary[Any, OutputReader] = WeakKeyDictionary()


def stepped(core: Any) -> list[TokenOutput]:
    """The outputs of an engine's next step, all steps of which are taken so."""
    return _READERS.setdefault(core, OutputReader()).read(core.step())


def updated(scheduler: Any, batch: ScheduledBatch, output: StepOutput) -> list[TokenOutput]:
    """The same of a scheduler that takes in a step's results, or whose requests failed before."""
    scheduler.update(batch, output)
    return taken(scheduler)


def taken(scheduler: Any) -> list[TokenOutput]:
    """What a scheduler's choices gained since the last call."""
    return _READERS.setdefault(scheduler, OutputReader()).read(scheduler.take_deltas())


class DeltaWriter:
    """Outputs of choices as the deltas of a step. Choices are numbered in the order in which they come."""

    def __init__(self) -> None:
        self._deltas, self._numbers = GrowingDeltas(), itertools.count()
        self._open: dict[tuple[str, int], Any] = {}

    def deltas(self, outputs: Iterable[TokenOutput]) -> StepDeltas:
        """The deltas of a step that gave these."""
        for output in outputs:
            self._deltas.now_s = output.produced_s
            sequence = self._sequence(output)
            number = sequence.sequence_id
            self._deltas._start(sequence)
            if output.error is not None:
                self._deltas.fail(sequence, output.error)
                for name in [name for name in self._open if name[0] == output.request_id]:
                    self._deltas.close(self._open.pop(name))
                continue
            if output.snapshots != sequence.snapshots:
                sequence.snapshots = output.snapshots
                self._deltas.use_snapshots(sequence, NO_SNAPSHOTS)
            if output.token_ids:
                ids = np.array(output.token_ids, np.int32)
                self._deltas.add_tokens(np.full(len(ids), number), ids)
            if output.logprobs:
                self._deltas.add_logprobs(number, output.logprobs)
            if output.prompt_logprobs:
                self._deltas.add_prompt_logprobs(sequence, output.prompt_logprobs)
            if output.finish_reason is not None:
                sequence.token_ids = [output.stop_token_id or 0]
                pooled = None if output.pooled is None else np.array(output.pooled)
                self._deltas.end(sequence, output.finish_reason, pooled)
                self._deltas.close(self._open.pop((output.request_id, output.choice)))
        return self._deltas.take()

    def _sequence(self, output: TokenOutput) -> Any:
        name = output.request_id, output.choice
        if name not in self._open:
            self._open[name] = sequence = SimpleNamespace(
                sequence_id=next(self._numbers), request=SimpleNamespace(request_id=name[0]), choice=name[1],
                scheduled_s=output.scheduled_s, num_cached_tokens=output.num_cached_tokens, snapshots=NO_SNAPSHOTS,
                drafts=NO_DRAFTS,
            )  # fmt: skip
            self._deltas.open(sequence)  # type: ignore[arg-type]
        return self._open[name]
