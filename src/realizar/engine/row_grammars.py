"""`RowGrammars`: grammars of the rows that have one, and each step's masks, computed while the backend works."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from realizar.backends.base import RowOutput, Step
from realizar.batch import OpenedRow, ScheduledBatch
from realizar.errors import InvalidRequestError, RealizarError
from realizar.sampling_params import StructuredOutput
from realizar.structured.grammar import Grammar, GrammarFactory, GrammarMatcher

_LOG = logging.getLogger(__name__)
_CACHED_GRAMMARS = 64  # at most some 20 MB each, where they have worn out their bounds


@dataclass(slots=True)
class _Row:
    structured: StructuredOutput
    matcher: GrammarMatcher


@dataclass(frozen=True, slots=True)
class _Masks:
    """Masks of a step on their way: the rows, and the scheduler's numbers of their sequences."""

    rows: tuple[int, ...]
    sequence_ids: tuple[int, ...]
    future: Future[list[NDArray[np.uint32]]]


class RowGrammars:
    """Follows each row's grammar. One step's masks are computed at a time, on a thread of their own.

    Only `prepare` and `is_prepared` may be called from any thread.

    Args:
        new_factory: makes the compiler of the model's grammars when the first is asked for; None where there is no
            vocabulary, so that every grammar is refused.
    """

    def __init__(self, new_factory: Callable[[], GrammarFactory] | None) -> None:
        self._new_factory = new_factory
        self._factory: GrammarFactory | None = None
        self._factory_lock = threading.Lock()
        self._compiled: OrderedDict[StructuredOutput, Grammar | InvalidRequestError] = OrderedDict()
        self._compiled_lock = threading.Lock()
        self._rows: dict[int, _Row] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._masks: _Masks | None = None

    def read_vocabulary(self) -> None:
        """Make the compiler of grammars now; where there can be none, grammars will be refused with the reason."""
        try:
            self._made_factory()
        except RealizarError as error:
            _LOG.info("no structured output: %s", error)

    def is_prepared(self, structured: StructuredOutput | None) -> bool:
        """Whether `prepare` would return, or refuse, at once."""
        with self._compiled_lock:
            return structured is None or structured in self._compiled

    def prepare(self, structured: StructuredOutput | None) -> None:
        """Compile a request's grammar, unless that was done before.

        Raises:
            InvalidRequestError: it is malformed, not supported, impossible, or the model can't follow one.
        """
        if structured is not None:
            self._grammar(structured)

    def open(self, opened: OpenedRow) -> None:
        """Start a row; its history may hold output already."""
        structured = opened.sampling.structured
        if structured is not None:
            matcher = self._grammar(structured).start(opened.history[opened.num_prompt_tokens :])
            self._rows[opened.row] = _Row(structured, matcher)

    def close(self, row: int) -> None:
        """End a row."""
        self._rows.pop(row, None)

    def start(self, batch: ScheduledBatch) -> None:
        """Begin to compute a step's masks; all earlier choices of its rows have been taken in."""
        wanted = [each for each in batch.rows if each.sample and each.row in self._rows]
        if not wanted:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "realizar-masks")
        matchers = [(self._rows[each.row].matcher, each.draft_ids) for each in wanted]
        future = self._thread.submit(self._made_factory().masks, matchers)
        self._masks = _Masks(tuple(each.row for each in wanted), tuple(each.sequence_id for each in wanted), future)

    def give(self, step: Step) -> dict[int, str]:
        """Wait for the masks and set them on their step.

        Returns:
            Number of the sequence to reason, for rows that can't go on: what they get from the step is to be dropped.
        """
        if self._masks is None:
            return {}
        masks, self._masks = self._masks, None
        failure = masks.future.exception()
        if failure is not None:
            raise RuntimeError(f"masks could not be computed: {failure}") from failure
        ready: dict[int, NDArray[np.uint32]] = {}
        stuck: dict[int, str] = {}
        for row, sequence_id, mask in zip(masks.rows, masks.sequence_ids, masks.future.result(), strict=True):
            state = self._rows[row]
            if state.matcher.error is None:
                ready[row] = mask
            else:
                stuck[sequence_id] = state.matcher.error
                self._forget(state.structured)
        if ready:
            step.set_masks(ready)
        return stuck

    def drop(self) -> None:
        """Forget the masks on their way: their step is lost."""
        if self._masks is not None:
            self._masks.future.exception()  # the thread reads the rows' grammars until then
            self._masks = None

    def advance(self, batch: ScheduledBatch, results: Iterable[RowOutput]) -> None:
        """Take in a step's choices."""
        for scheduled, result in zip(batch.rows, results, strict=True):
            state = self._rows.get(scheduled.row) if scheduled.sample else None
            if state is not None and not state.matcher.ended:
                state.matcher.advance(result.token_ids)

    def shutdown(self) -> None:
        """End the thread; idempotent."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _grammar(self, structured: StructuredOutput) -> Grammar:
        with self._compiled_lock:
            found = self._compiled.get(structured)
            if found is not None:
                self._compiled.move_to_end(structured)
        if found is None:
            try:
                found = self._made_factory().compile(structured)
            except InvalidRequestError as error:
                found = error
            with self._compiled_lock:
                self._compiled[structured] = found
                while len(self._compiled) > _CACHED_GRAMMARS:
                    self._compiled.popitem(last=False)
        if isinstance(found, InvalidRequestError):
            raise InvalidRequestError(str(found), found.param)
        return found

    def _forget(self, structured: StructuredOutput) -> None:
        """Compile it anew the next time: matchers share what is learned of a grammar, and this may be worn out."""
        with self._compiled_lock:
            self._compiled.pop(structured, None)

    def _made_factory(self) -> GrammarFactory:
        with self._factory_lock:
            if self._factory is None:
                if self._new_factory is None:
                    raise InvalidRequestError("structured output needs the model's vocabulary", "structured")
                self._factory = self._new_factory()
            return self._factory
