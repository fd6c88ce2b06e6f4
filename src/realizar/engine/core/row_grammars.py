"""`RowGrammars`: grammars of the rows that have one, and each step's masks, computed while the backend works."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from realizar.backends.base import Step
from realizar.backends.row_masks import RowMasks
from realizar.batch import NOT_SAMPLED, OpenedRow, StepOutput, StepRows
from realizar.errors import InvalidRequestError, RealizarError
from realizar.outputs import RowError
from realizar.request import Request
from realizar.structured.workers.grammar_rows import GrammarRow
from realizar.structured.workers.mask_requests import MaskRequests
from realizar.structured.workers.service import GrammarService

_LOG = logging.getLogger(__name__)
_STUCK = "the output can't go on within its grammar"
_UNFIT = "the text that the output is to go on from does not fit its grammar"
_NO_VOCABULARY = "structured output needs the model's vocabulary"
_NO_SLOT = -1
_STEP_WEIGHT = 0.1  # of the last step in the mean
_FIRST_S = 0.01
_LONGEST_S = 0.1  # a step that reads a long prompt says nothing about the others
_MOST_S = 0.25  # for the rows of a step that are all late: meanwhile nobody is added and nobody leaves


@dataclass(frozen=True, slots=True, eq=False)
class _Asking:
    """The rows of a step that sample within grammars, all [rows]; `slots` are in the shared memory."""

    step: StepRows
    index: NDArray[np.intp]
    numbers: NDArray[np.intp]
    slots: NDArray[np.intp]
    num_drafts: NDArray[np.int32]

    def those(self, kept: NDArray[np.bool_]) -> _Asking:
        """Some of the rows, bool [rows]."""
        return _Asking(self.step, self.index[kept], self.numbers[kept], self.slots[kept], self.num_drafts[kept])


class Patience:
    """Weighs what waiting costs all rows of a step against what it costs the late ones to be deferred.

    A row that is deferred loses a step, and a moment of waiting costs each row that moment. So a step waits for the
    late rows' share of its time, which costs at most twice what the better choice would have.
    """

    def __init__(self) -> None:
        self._step_s = _FIRST_S
        self._last_s: float | None = None

    def note(self, now_s: float, *, is_idle: bool = False) -> None:
        """A step has its masks at `now_s`, on any steady clock; or, `is_idle`, goes on without any."""
        if self._last_s is not None and not is_idle:
            self._step_s += _STEP_WEIGHT * (min(now_s - self._last_s, _LONGEST_S) - self._step_s)
        self._last_s = now_s

    def left_s(self, waited_s: float, num_late: int, num_rows: int) -> float:
        """Seconds that the step still waits, having waited `waited_s`; below 0 if that was enough."""
        return (_MOST_S if num_late == num_rows else self._step_s * num_late / num_rows) - waited_s


class RowGrammars:
    """Follows each row's grammar. The masks of its next token are asked for as soon as the one before is known.

    Only `prepare_later` may be called from any thread.

    Args:
        new_service: makes what compiles and follows the model's grammars when the first is asked for; None where there
            is no vocabulary, so that every grammar is refused.
    """

    def __init__(self, new_service: Callable[[], GrammarService] | None, max_rows: int) -> None:
        self._new_service = new_service
        self._service: GrammarService | None = None
        self._refusal: str | None = None
        self._service_lock = threading.Lock()
        self._rows: dict[int, GrammarRow] = {}
        self._slots = np.full(max_rows, _NO_SLOT, np.intp)  # of each row with a grammar, by its number
        self._asking: _Asking | None = None  # of the step whose masks were asked for last
        self._is_given = True
        self._patience = Patience()

    def read_vocabulary(self) -> None:
        """Read the vocabulary before the first grammar; if that fails, grammars are refused with the reason."""
        try:
            self._made_service().start()
        except RealizarError as error:
            _LOG.info("structured output is not available: %s", error)

    def prepare(self, request: Request) -> None:
        """As `GrammarService.prepare`, of a request that may have no grammar. InvalidRequestError: no vocabulary."""
        if request.sampling.structured is not None:
            self._made_service().prepare(request.sampling.structured, request.client.name)

    def prepare_later(self, request: Request, on_done: Callable[[RealizarError | None], None]) -> Callable[[], None]:
        """As `prepare`, in the background; `on_done` is called with the result on another thread. Returns a callback,
        which any thread may call, for when the request waits no more.
        """
        structured = request.sampling.structured
        if structured is None:
            raise InvalidRequestError("the request has no grammar", "structured")
        service = self._made_service()
        ticket = service.prepare_later(structured, request.client.name, on_done)
        return lambda: service.cancel(ticket)

    def acquire(self, request: Request, is_open: Callable[[str], bool]) -> bool:
        """Keep a request's grammar, if it has one, while the request is open; False if it is not compiled yet.

        InvalidRequestError, RequestFailedError: the grammar was refused.
        """
        structured = request.sampling.structured
        if structured is None:
            return True
        service = self._made_service()
        service.rows.wait(0)  # a process whose rows have all ended is free for others once it has answered
        return service.known.acquire(request.request_id, structured, is_open, request.client.name)

    def open(self, opened: OpenedRow) -> None:
        """Start a row; its history may hold output already."""
        structured = opened.sampling.structured
        if structured is not None:
            output = opened.history[opened.num_prompt_tokens :]
            row = self._made_service().open_row(structured, output, opened.sampling.structured_begun)
            self._rows[opened.row], self._slots[opened.row] = row, row.slot

    def close(self, row: int) -> None:
        found = self._rows.pop(row, None)
        if found is not None:
            self._slots[row] = _NO_SLOT
            self._made_service().close_row(found)

    def start(self, rows: StepRows) -> None:
        """Ask for a step's masks, those of rows apart that were asked for; all earlier tokens have been taken in."""
        self._asking = asking = self._with_grammars(rows)
        self._is_given = False
        if asking is None:
            return
        masks = self._made_service().rows
        drafts = self._new_drafts(asking, masks)
        new = ~masks.wanted[asking.slots]
        if not new.any():
            return
        try:
            masks.ask(asking.slots[new], drafts)
        except Exception as error:  # noqa: BLE001 - the rows with grammars end, and nobody else
            self._fail(asking.numbers[new].tolist(), error)

    def _new_drafts(self, asking: _Asking, masks: MaskRequests) -> dict[int, tuple[int, ...]]:
        """The drafts of rows whose masks are to be asked for, by slot; masks after other drafts are wanted no more."""
        new: dict[int, tuple[int, ...]] = {}
        for at in asking.num_drafts.nonzero()[0].tolist():
            row, end = self._rows[int(asking.numbers[at])], int(asking.step.starts[asking.index[at] + 1])
            drafts = tuple(asking.step.token_ids[end - int(asking.num_drafts[at]) : end].tolist())
            if not masks.wanted[row.slot] or row.drafts[: len(drafts)] != drafts:
                masks.wanted[row.slot] = False
                new[row.slot] = drafts
        return new

    def give(self, step: Step, failing: dict[int, RowError], *, waits: bool = True) -> frozenset[int] | None:
        """Set the masks on their step, as soon as all are there or waiting longer for some costs more than it gives.

        Without `waits`, they are set only if all are there by now. Returns the rows that sample nothing: those whose
        masks are late, and those that can't go on, whose errors go to `failing` by the number of their sequence. None:
        no mask was set now.
        """
        asking = self._asking
        if self._is_given or asking is None:
            return None
        masks = self._made_service().rows
        if not (waits or masks.are_answered(asking.slots)):
            return None
        late = self._late(asking, masks, waits=waits)
        if late is None:
            self._is_given = True
            self._patience.note(time.monotonic())
            self._set(step, asking)
            return frozenset()
        failed = masks.are_failed(asking.slots)
        ready = ~(late | failed)
        if not (waits or ready.all()):
            return None
        self._is_given = True
        self._patience.note(time.monotonic(), is_idle=np.count_nonzero(late) == len(asking.step))
        if ready.any():
            self._set(step, asking.those(ready))
        if ready.all():
            return frozenset()
        for at in failed.nonzero()[0].tolist():
            row = self._rows[int(asking.numbers[at])]
            failing[int(asking.step.sequence_ids[asking.index[at]])] = _row_error(row)
            self._made_service().known.forget(row.grammar.structured)
        deferred = frozenset(asking.numbers[~ready].tolist())
        step.defer(deferred)
        return deferred

    def _set(self, step: Step, ready: _Asking) -> None:
        """Set the masks of rows on their step."""
        memory, slots = self._made_service().rows.memory, ready.slots
        drafted = {
            int(ready.numbers[at]): memory.of(int(slots[at]), int(ready.num_drafts[at]))
            for at in ready.num_drafts.nonzero()[0].tolist()
        }
        step.set_masks(RowMasks(ready.numbers, memory.mask_indices[slots], memory.masks, drafted, memory.versions))

    def _late(self, asking: _Asking, masks: MaskRequests, *, waits: bool) -> NDArray[np.bool_] | None:
        """bool [rows], those whose masks are not there, and with `waits` not awaited any longer; None: at the first
        look all are there, and no row has an error.
        """
        started_s, late = time.monotonic(), np.zeros(len(asking.slots), np.bool_)
        try:
            masks.wait(0)
            if masks.are_all_there(asking.slots):
                return None
            awaited = (late := ~masks.are_done(asking.slots)).nonzero()[0]
            while len(awaited):
                waited_s = time.monotonic() - started_s
                left_s = self._patience.left_s(waited_s, len(awaited), len(asking.step)) if waits else 0.0
                if left_s <= 0:
                    break
                masks.wait(left_s)
                are_done = masks.are_done(asking.slots[awaited])
                late[awaited[are_done]] = False
                awaited = awaited[~are_done]
        except Exception as error:  # noqa: BLE001 - the rows with grammars end, and nobody else
            self._fail(asking.numbers.tolist(), error)
            late[:] = False
        return late

    def _fail(self, numbers: list[int], error: Exception) -> None:
        _LOG.error("masks could not be computed", exc_info=error)
        for number in numbers:
            reason = f"masks could not be computed: {type(error).__name__}"
            self._made_service().rows.fail(self._rows[number], reason, "engine")

    def certain_ids(self, row: int, most: int) -> tuple[int, ...]:
        """Up to `most` next tokens of a row that its grammar forces, as far as they are known, to be drafts."""
        found = self._rows.get(row)
        return () if found is None else self._made_service().rows.certain_ids(found.slot, most)

    def drop(self) -> None:
        """Forget the step that masks are asked for: it is lost. The masks are those of its rows' next tokens still."""
        self._asking = None

    def advance(self, rows: StepRows, output: StepOutput) -> None:
        """Take in a step's sampled tokens. A row that has none waits for the same masks."""
        asking = self._asking if self._asking is not None and rows is self._asking.step else self._with_grammars(rows)
        if asking is None:
            return
        slots, sampled = asking.slots, output.sampled[asking.index]
        counts = (sampled != NOT_SAMPLED).sum(axis=1)
        if not counts.all():
            any_sampled = counts > 0
            slots, sampled, counts = slots[any_sampled], sampled[any_sampled], counts[any_sampled]
        self._made_service().rows.advance(slots, sampled, counts)

    def _with_grammars(self, rows: StepRows) -> _Asking | None:
        if not self._rows:
            return None
        slots = self._slots[rows.numbers]
        index = (rows.samples & (slots != _NO_SLOT)).nonzero()[0]
        if not len(index):
            return None
        return _Asking(rows, index, rows.numbers[index], slots[index], rows.num_drafts[index])

    def shutdown(self) -> None:
        """End the processes; idempotent."""
        with self._service_lock:
            service = self._service
        if service is not None:
            service.close()

    def _made_service(self) -> GrammarService:
        """The service. Reading a vocabulary takes a second, so that a failure is final."""
        with self._service_lock:
            if self._service is None:
                if self._refusal is not None or self._new_service is None:
                    raise InvalidRequestError(self._refusal or _NO_VOCABULARY, "structured")
                try:
                    self._service = self._new_service()
                except RealizarError as error:
                    self._refusal = str(error)
                    raise InvalidRequestError(self._refusal, "structured") from error
            return self._service


def _row_error(row: GrammarRow) -> RowError:
    param = "structured" if row.cause == "request" else None
    begun = row.num_begun and len(row.output) == row.num_begun
    return RowError(f"{_UNFIT if begun else _STUCK}: {row.error}", row.cause, param)
