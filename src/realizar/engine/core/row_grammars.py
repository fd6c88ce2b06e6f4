"""`RowGrammars`: grammars of the rows that have one, and each step's masks, computed while the backend works."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from realizar.backends.base import Step
from realizar.batch import OpenedRow, StepOutput, StepRows
from realizar.engine.core.patience import Patience
from realizar.errors import InvalidRequestError, RealizarError
from realizar.outputs import RowError
from realizar.request import Request
from realizar.sampling_params import StructuredOutput
from realizar.structured.workers.followed import AskedMasks, FollowedRow
from realizar.structured.workers.service import GrammarService

_LOG = logging.getLogger(__name__)
_STUCK = "the output can't go on within its grammar"
_LONG_S = 60.0  # to be woken by the next mask, or by the end of its process


@dataclass(frozen=True, slots=True)
class GivenMasks:
    """What became of a step's masks.

    Attributes:
        stuck: rows that can't go on: number of the sequence to its request's error. What they get from the step is to
            be dropped.
        held: numbers of rows that make no choice in the step: those that are stuck, and those whose masks are late.
    """

    stuck: dict[int, RowError] = field(default_factory=dict)
    held: frozenset[int] = frozenset()


_NONE_GIVEN = GivenMasks()


class RowGrammars:
    """Follows each row's grammar. The masks of its next choice are asked for as soon as the one before is known.

    Only `prepare` and `prepare_later` may be called from any thread.

    Args:
        new_service: makes what compiles and follows the model's grammars when the first is asked for; None where there
            is no vocabulary, so that every grammar is refused.
    """

    def __init__(self, new_service: Callable[[], GrammarService] | None) -> None:
        self._new_service = new_service
        self._service: GrammarService | None = None
        self._refusal: str | None = None
        self._service_lock = threading.Lock()
        self._rows: dict[int, FollowedRow] = {}
        self._asked: dict[int, AskedMasks] = {}  # masks of the rows' next choices, by the row's number
        self._step: StepRows | None = None  # whose masks were asked for last
        self._followed: list[tuple[int, int]] = []  # its rows with grammars: index in the step, and number
        self._is_given = True
        self._patience = Patience()

    def read_vocabulary(self) -> None:
        """Read the vocabulary before the first grammar; if that fails, grammars are refused with the reason."""
        try:
            self._made_service().start()
        except RealizarError as error:
            _LOG.info("structured output is not available: %s", error)

    def prepare(self, structured: StructuredOutput | None, client: str = "") -> None:
        """Compile a request's grammar, unless that was done before; waits for it.

        Raises:
            InvalidRequestError: it is malformed, not supported, impossible, or the model can't follow one.
            RequestFailedError: its process failed, which may be the machine's fault.
            QueueFullError: there is no room for it now.
        """
        if structured is not None:
            self._made_service().prepare(structured, client)

    def prepare_later(self, request: Request, on_done: Callable[[RealizarError | None], None]) -> Callable[[], None]:
        """Compile a request's grammar in the background; `on_done` is called with the result on another thread.

        Returns:
            A callback for when the request waits no more.

        Raises what `prepare` does.
        """
        structured = request.sampling.structured
        if structured is None:
            raise InvalidRequestError("the request has no grammar", "structured")
        service = self._made_service()
        ticket = service.prepare_later(structured, request.client, on_done)
        return lambda: service.cancel(ticket)

    def hold(self, request: Request, is_open: Callable[[str], bool]) -> bool:
        """Keep a request's grammar, if it is compiled, for as long as the request is open.

        Returns:
            True if it is kept, or the request has none.

        Raises:
            InvalidRequestError, RequestFailedError: it was refused.
        """
        structured = request.sampling.structured
        if structured is None:
            return True
        service = self._made_service()
        service.wait(0)  # a process whose rows have all ended is free for others once its last answer is taken in
        return service.hold(request.request_id, structured, is_open, request.client)

    def open(self, opened: OpenedRow) -> None:
        """Start a row; its history may hold output already."""
        structured = opened.sampling.structured
        if structured is not None:
            output = opened.history[opened.num_prompt_tokens :]
            self._rows[opened.row] = self._made_service().open_row(structured, output)

    def close(self, row: int) -> None:
        """End a row."""
        followed = self._rows.pop(row, None)
        if followed is not None:
            self._made_service().close_row(followed)
            self._forget_masks(row)

    def start(self, rows: StepRows) -> None:
        """Ask for a step's masks, those of rows apart that were asked for; all earlier choices have been taken in."""
        self._step, self._followed = rows, self._with_grammars(rows)
        self._is_given = False
        if not self._followed:
            return
        service, num_drafts = self._made_service(), rows.num_drafts.tolist()
        new: list[tuple[int, tuple[int, ...]]] = []
        for index, number in self._followed:
            drafts = rows.row(index).draft_ids if num_drafts[index] else ()
            asked = self._asked.get(number)
            if asked is not None and asked.drafts[: len(drafts)] != drafts:
                service.drop(self._asked.pop(number))
                asked = None
            if asked is None:
                new.append((number, drafts))
        if new:
            try:
                made = service.ask([(self._rows[number], drafts) for number, drafts in new])
            except Exception as error:  # noqa: BLE001 - the rows with grammars end, and nobody else
                self._fail([number for number, _ in new], error)
            else:
                self._asked.update(zip([number for number, _ in new], made, strict=True))

    def give(self, step: Step, can_hold: Callable[[int], bool]) -> GivenMasks:
        """Set the masks on their step, as soon as all are there or waiting longer for some costs more than it gives.

        Args:
            can_hold: true for a row, by its number, that may do without a choice in this step.
        """
        rows, followed = self._step, self._followed
        if self._is_given or rows is None or not followed:
            return _NONE_GIVEN
        self._is_given = True
        service, num_drafts = self._made_service(), rows.num_drafts.tolist()
        late = self._late([number for _, number in followed], len(rows), can_hold)
        ready: dict[int, NDArray[np.uint32]] = {}
        stuck: dict[int, RowError] = {}
        for index, number in followed:
            row = self._rows[number]
            if row.error is not None:
                stuck[int(rows.sequence_ids[index])] = _row_error(row)
                service.forget(row.grammar.structured)
            elif number not in late:
                ready[number] = service.read(self._asked[number])[: num_drafts[index] + 1]
        if ready:
            step.set_masks(ready)
        held = frozenset(number for _, number in followed if number not in ready)
        if held:
            step.hold(held)
        return GivenMasks(stuck, held)

    def _late(self, numbers: list[int], num_rows: int, can_hold: Callable[[int], bool]) -> frozenset[int]:
        """Wait for the masks of rows; returns the rows whose masks are not awaited any longer."""
        try:
            late = self._wait(numbers, num_rows, can_hold)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(numbers, error)
            return frozenset()
        if len(late) < num_rows:
            self._patience.note_step(time.monotonic())
        else:
            self._patience.note_idle(time.monotonic())
        return late

    def _fail(self, numbers: list[int], error: Exception) -> None:
        """End rows for a fault of the program."""
        _LOG.error("masks could not be computed", exc_info=error)
        for number in numbers:
            followed = self._rows[number]
            followed.error, followed.cause = f"masks could not be computed: {type(error).__name__}", "engine"

    def _wait(self, late: list[int], num_rows: int, can_hold: Callable[[int], bool]) -> frozenset[int]:
        service, started_s = self._made_service(), time.monotonic()
        service.wait(0)
        while late := [number for number in late if not self._is_settled(number)]:
            left_s = self._patience.left_s(time.monotonic() - started_s, len(late), num_rows)
            if left_s <= 0 and all(can_hold(number) for number in late):
                break
            service.wait(left_s if left_s > 0 else _LONG_S)
        return frozenset(late)

    def _is_settled(self, number: int) -> bool:
        """True if a row's masks are there, or never will be."""
        return self._rows[number].error is not None or self._asked[number].done

    def drop(self) -> None:
        """Forget the step that masks are asked for: it is lost. The masks are those of its rows' next choices still."""
        self._step = None

    def advance(self, rows: StepRows, output: StepOutput) -> None:
        """Take in a step's choices. A row that made none waits for the same masks."""
        followed = self._followed if rows is self._step else self._with_grammars(rows)
        if not followed:
            return
        counts, choices = output.num_choices.tolist(), output.choices.tolist()
        for index, number in followed:
            if counts[index]:
                self._rows[number].advance(choices[index][: counts[index]])
                self._forget_masks(number)

    def _forget_masks(self, number: int) -> None:
        asked = self._asked.pop(number, None)
        if asked is not None:
            self._made_service().drop(asked)

    def _with_grammars(self, rows: StepRows) -> list[tuple[int, int]]:
        """Those of the rows that choose and have a grammar: index in the step, and number."""
        if not self._rows:
            return []
        choosing = rows.samples.nonzero()[0]
        numbers = rows.numbers[choosing].tolist()
        return [each for each in zip(choosing.tolist(), numbers, strict=True) if each[1] in self._rows]

    def shutdown(self) -> None:
        """End the processes; idempotent."""
        with self._service_lock:
            service = self._service
        if service is not None:
            service.close()

    def _made_service(self) -> GrammarService:
        with self._service_lock:
            if self._service is None:
                self._service = self._new_or_refused()
            return self._service

    def _new_or_refused(self) -> GrammarService:
        """Make the service. Reading a vocabulary takes a second, so that a failure is final."""
        if self._refusal is not None:
            raise InvalidRequestError(self._refusal, "structured")
        if self._new_service is None:
            raise InvalidRequestError("structured output needs the model's vocabulary", "structured")
        try:
            return self._new_service()
        except RealizarError as error:
            self._refusal = str(error)
            raise InvalidRequestError(self._refusal, "structured") from error


def _row_error(followed: FollowedRow) -> RowError:
    param = "structured" if followed.cause == "request" else None
    return RowError(f"{_STUCK}: {followed.error}", followed.cause, param)
