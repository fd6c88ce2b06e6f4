"""`RowGrammars`: grammars of the rows that have one, and each step's masks, computed while the backend works."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from realizar.backends.base import Step
from realizar.batch import OpenedRow, StepOutput, StepRows
from realizar.errors import InvalidRequestError, RealizarError
from realizar.outputs import RowError
from realizar.request import Request
from realizar.sampling_params import StructuredOutput
from realizar.structured.workers.followed import FollowedRow
from realizar.structured.workers.service import GrammarService

_LOG = logging.getLogger(__name__)
_STUCK = "the output can't go on within its grammar"


@dataclass(frozen=True, slots=True)
class _Masks:
    """Masks of a step that are being computed: the rows, and the scheduler's numbers of their sequences."""

    rows: tuple[int, ...]
    sequence_ids: tuple[int, ...]
    future: Future[list[NDArray[np.uint32]]]


class RowGrammars:
    """Follows each row's grammar. One step's masks are computed at a time, on a thread of their own.

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
        self._thread: ThreadPoolExecutor | None = None
        self._masks: _Masks | None = None

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
        return self._made_service().hold(request.request_id, structured, is_open, request.client)

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

    def start(self, rows: StepRows) -> None:
        """Begin to compute a step's masks; all earlier choices of its rows have been taken in."""
        wanted = [rows.row(index) for index in self._followed(rows)]
        if not wanted:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "realizar-masks")
        given = [(self._rows[each.row], each.draft_ids) for each in wanted]
        future = self._thread.submit(self._made_service().masks, given)
        self._masks = _Masks(tuple(each.row for each in wanted), tuple(each.sequence_id for each in wanted), future)

    def give(self, step: Step) -> dict[int, RowError]:
        """Wait for the masks and set them on their step.

        Returns:
            Number of the sequence to its request's error, for rows that can't go on: what they get from the step is to
            be dropped.
        """
        if self._masks is None:
            return {}
        masks, self._masks = self._masks, None
        failure = masks.future.exception()
        if failure is not None:
            _LOG.error("masks could not be computed", exc_info=failure)
            error = RowError(f"{_STUCK}: masks could not be computed: {type(failure).__name__}")
            return dict.fromkeys(masks.sequence_ids, error)
        ready: dict[int, NDArray[np.uint32]] = {}
        stuck: dict[int, RowError] = {}
        for row, sequence_id, mask in zip(masks.rows, masks.sequence_ids, masks.future.result(), strict=True):
            state = self._rows[row]
            if state.error is None:
                ready[row] = mask
            else:
                param = "structured" if state.cause == "request" else None
                stuck[sequence_id] = RowError(f"{_STUCK}: {state.error}", state.cause, param)
                self._made_service().forget(state.grammar.structured)
        if ready:
            step.set_masks(ready)
        return stuck

    def drop(self) -> None:
        """Forget the masks that are being computed: their step is lost."""
        if self._masks is not None:
            self._masks.future.exception()  # the thread reads the rows until then
            self._masks = None

    def advance(self, rows: StepRows, output: StepOutput) -> None:
        """Take in a step's choices."""
        for index in self._followed(rows):
            self._rows[int(rows.numbers[index])].advance(output.row(index).token_ids)

    def _followed(self, rows: StepRows) -> list[int]:
        """Those of the rows that choose and have a grammar, by their index."""
        if not self._rows:
            return []
        choosing = rows.samples.nonzero()[0]
        numbers = rows.numbers[choosing].tolist()
        return [index for index, number in zip(choosing.tolist(), numbers, strict=True) if number in self._rows]

    def shutdown(self) -> None:
        """End the thread and the processes; idempotent."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
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
