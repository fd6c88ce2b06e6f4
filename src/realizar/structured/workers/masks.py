"""`StepMasks` collects a step's masks, and handles processes that fail while they compute them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from realizar.errors import InvalidRequestError, RealizarError
from realizar.outputs import ErrorCause
from realizar.structured.workers.followed import FollowedGrammar, FollowedRow
from realizar.structured.workers.mask_memory import MaskMemory
from realizar.structured.workers.messages import RowStep, Step
from realizar.structured.workers.server_handle import ServerError
from realizar.structured.workers.worker import GrammarWorker, WorkerDiedError

_LOG = logging.getLogger(__name__)
_MOST_LATE = 2  # rows of a grammar that may time out one by one, before the other rows are given up
_LEAST_S = 1e-3  # for a process when the step's time is over, so that an answer that has arrived still counts


@dataclass(slots=True)
class _Part:
    """One row's part of a step: its drafts, and the index of its first mask in the memory."""

    row: FollowedRow
    drafts: tuple[int, ...]
    start: int = 0


class StepMasks:
    """Computes the masks of one step at a time. Not thread-safe.

    Args:
        memory: the shared memory for masks.
        num_words: uint32 words of a mask.
        step_s: seconds in which all processes of a step must answer, and again for each process that is asked anew.
        revive: gives a grammar a new process. Raises RealizarError, ServerError or WorkerDiedError.
        condemn: callback with a grammar, a reason and the cause, when its process died of one row alone.
    """

    def __init__(
        self,
        memory: MaskMemory,
        num_words: int,
        step_s: float,
        revive: Callable[[FollowedGrammar], GrammarWorker],
        condemn: Callable[[FollowedGrammar, str, ErrorCause], None],
    ) -> None:
        self._memory, self._num_words, self._step_s = memory, num_words, step_s
        self._revive, self._condemn = revive, condemn

    def compute(self, rows: Sequence[tuple[FollowedRow, Sequence[int]]]) -> list[NDArray[np.uint32]]:
        """Compute the allowed ids of rows and of their drafts: uint32 [drafts + 1, words] for each row.

        A row that can't go on gets an `error`, and its masks are empty.
        """
        parts = [_Part(row, tuple(drafts)) for row, drafts in rows]
        groups: dict[FollowedGrammar, list[_Part]] = {}
        for part in parts:
            if part.row.error is None:
                groups.setdefault(part.row.grammar, []).append(part)
        count = 0
        for group in groups.values():
            for part in group:
                part.start = count
                count += len(part.drafts) + 1
        self._memory.grow(count * self._num_words * 4)
        try:
            self._ask(groups)
        except BaseException:
            for grammar in groups:  # an answer may be on its way, and nobody will read it
                _drop_worker(grammar)
            raise
        return [self._taken(part) for part in parts]

    def _ask(self, groups: dict[FollowedGrammar, list[_Part]]) -> None:
        """Ask all processes at the same time, with one deadline; failed or late processes are asked anew."""
        deadline_s = monotonic() + self._step_s
        asked: list[FollowedGrammar] = []
        failed: list[tuple[FollowedGrammar, ErrorCause]] = []
        for grammar, parts in groups.items():
            try:  # a process that does not read leaves half of the time to the others
                self._send(grammar, parts, max(deadline_s - self._step_s / 2 - monotonic(), _LEAST_S))
                asked.append(grammar)
            except WorkerDiedError as death:
                failed.append((grammar, death.cause))
        waiting = {grammar.worker.fileno(): grammar for grammar in asked if grammar.worker is not None}
        while waiting:
            answered = wait(list(waiting), max(deadline_s - monotonic(), 0.0))
            for place in [each for each in waiting if not answered or each in answered]:
                grammar = waiting.pop(place)
                left_s = max(deadline_s - monotonic(), _LEAST_S) if answered else _LEAST_S
                try:
                    self._receive(grammar, groups[grammar], left_s)
                except WorkerDiedError as death:
                    reason = f"took longer than the {self._step_s:g} s of a step" if death.out_of_time else f"{death}"
                    _LOG.warning("a grammar's process %s; its rows start again with another process", reason)
                    failed.append((grammar, death.cause))
        for grammar, first in failed:
            self._one_by_one(grammar, groups[grammar], first)

    def _one_by_one(self, grammar: FollowedGrammar, parts: Sequence[_Part], first: ErrorCause) -> None:
        """Follow each row anew, alone, in a new process. Only a row that ends its process again gets an error.

        If the `first` death was not the grammar's fault, one more death is not a proof against the grammar.
        """
        num_late = 0
        reason, cause = "", first
        for part in parts:
            if num_late >= _MOST_LATE:
                part.row.error, part.row.cause = reason, cause
                continue
            try:
                if grammar.worker is None:
                    grammar.worker = self._revive(grammar)
            except (RealizarError, ServerError, WorkerDiedError) as error:
                num_late, reason = _MOST_LATE, f"it can't be compiled again: {error}"
                cause = "request" if isinstance(error, InvalidRequestError) else "engine"
                part.row.error, part.row.cause = reason, cause
                continue
            try:
                self._send(grammar, [part], self._step_s)
                self._receive(grammar, [part], self._step_s)
            except WorkerDiedError as death:
                num_late += death.out_of_time
                cause = death.cause if first == "request" else "engine"
                part.row.error = reason = f"following it {death}"
                part.row.cause = cause
                self._condemn(grammar, reason, cause)

    def _send(self, grammar: FollowedGrammar, parts: Sequence[_Part], timeout_s: float) -> None:
        worker = grammar.worker
        if worker is None:
            raise WorkerDiedError("has no process", out_of_time=False)
        closed = tuple(grammar.closed.popleft() for _ in range(len(grammar.closed)))
        steps = tuple(_row_step(part, worker) for part in parts)
        step = Step(steps, closed, parts[0].start * self._num_words * 4, self._memory.size_bytes)
        try:
            worker.send_step(step, timeout_s)
        except WorkerDiedError:
            grammar.worker = None
            raise

    def _receive(self, grammar: FollowedGrammar, parts: Sequence[_Part], timeout_s: float) -> None:
        worker = grammar.worker
        if worker is None:
            raise WorkerDiedError("has no process", out_of_time=False)
        try:
            answer = worker.receive_step(timeout_s)
        except WorkerDiedError:
            grammar.worker = None
            raise
        for part in parts:
            row = part.row
            row.worker, row.num_sent = worker, len(row.output)
            row.error, row.ended = answer.errors.get(row.key), row.key in answer.ended

    def _taken(self, part: _Part) -> NDArray[np.uint32]:
        """Copy a row's masks, as the next step overwrites the memory."""
        count = len(part.drafts) + 1
        if part.row.error is not None:
            return np.zeros((count, self._num_words), np.uint32)
        return self._memory.words(part.start * self._num_words * 4, count, self._num_words).copy()


def _row_step(part: _Part, worker: GrammarWorker) -> RowStep:
    row = part.row
    starts = row.worker is not worker
    return RowStep(row.key, starts, tuple(row.output if starts else row.output[row.num_sent :]), part.drafts)


def _drop_worker(grammar: FollowedGrammar) -> None:
    if grammar.worker is not None:
        grammar.worker.close()
        grammar.worker = None
