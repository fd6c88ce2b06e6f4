"""`StepMasks` asks the grammars' processes for masks and takes them in, without waiting for any one of them."""

from __future__ import annotations

import logging
import math
import os
import select
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from realizar.outputs import ErrorCause
from realizar.structured.workers.followed import AskedMasks, FollowedGrammar, FollowedRow
from realizar.structured.workers.mask_memory import MaskMemory
from realizar.structured.workers.mask_places import MaskPlaces
from realizar.structured.workers.messages import RowStep, Step
from realizar.structured.workers.repair import Repair
from realizar.structured.workers.worker import GrammarWorker, WorkerDiedError

_LOG = logging.getLogger(__name__)
_SEND_S = 0.5  # for a process that has answered all it was asked, and so reads
_POLL_S = 1e-3  # what the operating system's calls round a wait up to
_NAP_S = 2e-5
_REPAIRS = 4  # grammars whose dead processes are replaced at a time


class StepMasks:
    """Asks for masks. A process has one question at a time; what else its rows need is asked next.

    A process that dies or does not answer in time is replaced on another thread, while the rows of others go on. Not
    thread-safe.

    Args:
        memory: the shared memory for masks.
        num_words: uint32 words of a mask.
        step_s: seconds in which a process must answer.
        repair: follows rows anew whose process has died.
    """

    def __init__(
        self, memory: MaskMemory, num_words: int, step_s: float, repair: Repair,
        *, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._memory, self._num_words, self._step_s, self._repair = memory, num_words, step_s, repair
        self._clock = clock
        self._places = MaskPlaces()
        self._words = np.zeros((0, num_words), np.uint32)  # all masks of the memory
        self._asked: dict[int, tuple[FollowedGrammar, list[AskedMasks], float]] = {}  # by descriptor, with deadlines
        self._next: dict[int, list[AskedMasks]] = {}  # for processes that have a question, by descriptor
        self._workers: dict[int, GrammarWorker] = {}
        self._poll = select.poll()
        self._repairs: dict[Future[None], tuple[FollowedGrammar, list[AskedMasks]]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._bell, self._ring = os.pipe()
        os.set_blocking(self._bell, False)
        self._poll.register(self._bell, select.POLLIN)

    def ask(self, rows: Sequence[tuple[FollowedRow, Sequence[int]]]) -> list[AskedMasks]:
        """Ask for the allowed ids of rows and of their drafts; returns at once. See `AskedMasks.done` and `read`."""
        asked = [self._new(row, tuple(drafts)) for row, drafts in rows]
        self._make_room()
        self._send_all(asked)
        return asked

    def wait(self, timeout_s: float) -> None:
        """Take in the answers that are there; without any, wait for the first one, `timeout_s` at most."""
        now_s = self._clock()
        next_s = min(now_s + timeout_s, self._first_deadline_s)
        ready = self._ready(max(next_s - now_s, 0.0))
        for place in ready:
            if place == self._bell:
                self._take_repairs()
            else:
                self._take_answer(place)
        while self._first_deadline_s <= self._clock():
            place = next(iter(self._asked))
            self._fail(place, self._workers[place].late(self._step_s))

    @property
    def _first_deadline_s(self) -> float:
        """The time by which the first question must be answered; all have the same time, and so end in their order."""
        for _, _, deadline_s in self._asked.values():
            return deadline_s
        return math.inf

    def read(self, asked: AskedMasks) -> NDArray[np.uint32]:
        """The masks, uint32 [drafts + 1, words], which stay until they are dropped; empty if the row has an error."""
        count = len(asked.drafts) + 1
        if asked.row.error is not None:
            return np.zeros((count, self._num_words), np.uint32)
        return self._words[asked.place : asked.place + count]

    def drop(self, asked: AskedMasks) -> None:
        """Nobody needs these masks any more."""
        asked.dropped = True
        if asked.done:
            self._places.give_back(asked.place, len(asked.drafts) + 1)

    def close(self) -> None:
        """End the threads; all processes have been ended. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
        if self._bell >= 0:
            os.close(self._bell)
            os.close(self._ring)
            self._bell = self._ring = -1

    def _make_room(self) -> None:
        if self._places.num_places > len(self._words):
            self._memory.grow(self._places.num_places * self._num_words * 4)
            count = self._memory.size_bytes // (self._num_words * 4)
            self._words = self._memory.words(0, count, self._num_words)

    def _new(self, row: FollowedRow, drafts: tuple[int, ...]) -> AskedMasks:
        return AskedMasks(row, drafts, self._places.take(len(drafts) + 1))

    def _send_all(self, asked: Iterable[AskedMasks]) -> None:
        """Ask each process that has no question, with one message; keep what is for others."""
        groups: dict[FollowedGrammar, list[AskedMasks]] = {}
        for each in asked:
            grammar = each.row.grammar
            if each.row.error is not None:
                self._finish(each)
            elif grammar.waiting is not None:
                grammar.waiting.append(each)
            elif grammar.worker is not None and grammar.worker.fileno() in self._asked:
                self._next.setdefault(grammar.worker.fileno(), []).append(each)
            else:
                groups.setdefault(grammar, []).append(each)
        for grammar, parts in groups.items():
            if grammar.worker is None:
                self._start_repair(grammar, parts, "engine")
            else:
                self._send(grammar, grammar.worker, parts)

    def _send(self, grammar: FollowedGrammar, worker: GrammarWorker, parts: list[AskedMasks]) -> None:
        first: dict[int, AskedMasks] = {}
        later = [part for part in parts if first.setdefault(part.row.key, part) is not part]
        place = worker.fileno()
        self._workers[place] = worker
        self._asked[place] = grammar, list(first.values()), self._clock() + self._step_s
        if later:
            self._next.setdefault(place, []).extend(later)
        self._poll.register(place, select.POLLIN)
        try:
            worker.send_step(new_step(self._memory, worker, first.values()), _SEND_S)
        except WorkerDiedError as death:
            self._fail(place, death)

    def _ready(self, timeout_s: float) -> list[int]:
        """Descriptors that can be read, as soon as there are any."""
        end_s = self._clock() + timeout_s
        while True:
            left_s = end_s - self._clock()
            ready = self._poll.poll(math.floor(left_s / _POLL_S) if left_s >= _POLL_S else 0)
            if ready or left_s <= 0:
                return [place for place, _ in ready]
            if left_s < _POLL_S:
                time.sleep(_NAP_S)

    def _take_answer(self, place: int) -> None:
        if place not in self._asked:
            return  # it failed a moment ago
        _, parts, deadline_s = self._asked[place]
        worker = self._workers[place]
        try:
            answer = worker.receive_step(max(deadline_s - self._clock(), _POLL_S))
        except WorkerDiedError as death:
            self._fail(place, death)
            return
        if answer is None:  # it asked for something
            if worker.has_answer:
                self._take_answer(place)
            return
        self._forget(place)
        for part in parts:
            part.row.error, part.row.ended = answer.errors.get(part.row.key), part.row.key in answer.ended
            self._finish(part)
        waiting = self._next.pop(place, None)
        if waiting:
            self._send_all(waiting)

    def _forget(self, place: int) -> None:
        self._poll.unregister(place)
        del self._asked[place], self._workers[place]

    def _finish(self, asked: AskedMasks) -> None:
        asked.done = True
        if asked.dropped:
            self._places.give_back(asked.place, len(asked.drafts) + 1)

    def _fail(self, place: int, death: WorkerDiedError) -> None:
        """A process has died, or was ended as it is too late."""
        grammar, parts, _ = self._asked[place]
        self._forget(place)
        _LOG.warning("a grammar's process %s; its rows start again with another process", death)
        grammar.worker = None
        self._start_repair(grammar, parts, death.cause)
        assert grammar.waiting is not None
        grammar.waiting += self._next.pop(place, [])

    def _start_repair(self, grammar: FollowedGrammar, parts: list[AskedMasks], cause: ErrorCause) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_REPAIRS, "realizar-masks")
        grammar.waiting = []
        future = self._threads.submit(self._repair.follow_anew, grammar, parts, cause)
        self._repairs[future] = grammar, parts
        future.add_done_callback(lambda _future: os.write(self._ring, b"r"))

    def _take_repairs(self) -> None:
        os.read(self._bell, 1 << 12)
        for future in [each for each in self._repairs if each.done()]:
            grammar, parts = self._repairs.pop(future)
            failure = future.exception()
            if failure is not None:
                _LOG.error("masks could not be computed", exc_info=failure)
            for part in parts:
                if failure is not None:
                    part.fail(f"masks could not be computed: {type(failure).__name__}", "engine")
                self._finish(part)
            waiting, grammar.waiting = grammar.waiting or [], None
            self._send_all(waiting)


def new_step(memory: MaskMemory, worker: GrammarWorker, parts: Iterable[AskedMasks]) -> Step:
    """The message that asks a process for masks; from now on it counts as having its rows' ids."""
    steps = []
    for part in parts:
        row = part.row
        starts = row.worker is not worker
        token_ids = tuple(row.output if starts else row.output[row.num_sent :])
        steps.append(RowStep(row.key, starts, token_ids, part.drafts, part.place))
        row.worker, row.num_sent = worker, len(row.output)
    return Step(tuple(steps), worker.take_closed(), memory.size_bytes)
