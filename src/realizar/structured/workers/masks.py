"""`StepMasks` asks the grammars' processes for masks and takes them in, without waiting for any one of them."""

from __future__ import annotations

import logging
import math
import os
import select
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from realizar.outputs import ErrorCause
from realizar.structured.workers.followed import AskedMasks, FollowedGrammar, FollowedRow
from realizar.structured.workers.mask_memory import MaskMemory
from realizar.structured.workers.mask_places import MaskPlaces
from realizar.structured.workers.messages import RowStep, Step
from realizar.structured.workers.repair import Repair
from realizar.structured.workers.spread import Spread
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
        repair: follows rows anew whose process has died, and adds processes.
        most_more: processes that grammars may have beyond one each, of all together.
        clock: seconds, monotonic.
    """

    def __init__(
        self, memory: MaskMemory, num_words: int, step_s: float, repair: Repair, most_more: int,
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
        self._spread = Spread(most_more, self._spread_later)
        self._repairs: dict[Future[GrammarWorker | None], tuple[FollowedGrammar, list[AskedMasks]]] = {}
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
        for future in self._repairs:
            if future.exception() is None and (worker := future.result()) is not None:
                worker.close()
        self._repairs.clear()
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
        groups: dict[int, tuple[FollowedGrammar, GrammarWorker, list[AskedMasks]]] = {}
        lost: dict[FollowedGrammar, list[AskedMasks]] = {}
        for each in asked:
            grammar = each.row.grammar
            if each.dropped or each.row.error is not None:  # the row of dropped masks may be closed
                self._finish(each)
            elif grammar.waiting is not None:
                grammar.waiting.append(each)
            elif (worker := placed_worker(each.row)) is None:
                lost.setdefault(grammar, []).append(each)
            elif worker.is_asked:
                self._next.setdefault(worker.fileno(), []).append(each)
            else:
                place = worker.fileno()
                if place not in groups:
                    groups[place] = grammar, worker, []
                groups[place][2].append(each)
        for grammar, parts in lost.items():
            self._start_repair(grammar, parts, "engine")
        for grammar, worker, parts in groups.values():
            self._send(grammar, worker, parts)

    def _send(self, grammar: FollowedGrammar, worker: GrammarWorker, parts: list[AskedMasks]) -> None:
        first: dict[int, AskedMasks] = {}
        later = [part for part in parts if first.setdefault(part.row.key, part) is not part]
        place = worker.fileno()
        self._workers[place] = worker
        self._asked[place] = grammar, list(first.values()), self._clock() + self._step_s
        if later:
            self._next.setdefault(place, []).extend(later)
        self._poll.register(place, select.POLLIN)
        worker.is_asked = True
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
        grammar, parts, deadline_s = self._asked[place]
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
        self._spread.note(grammar, len(parts), answer.busy_s)
        for part in parts:
            part.row.error, part.row.ended = answer.errors.get(part.row.key), part.row.key in answer.ended
            self._finish(part)
        waiting = self._next.pop(place, None)
        if waiting:
            self._send_all(waiting)

    def _forget(self, place: int) -> None:
        self._poll.unregister(place)
        self._workers.pop(place).is_asked = False
        del self._asked[place]

    def _finish(self, asked: AskedMasks) -> None:
        asked.done = True
        if asked.dropped:
            self._places.give_back(asked.place, len(asked.drafts) + 1)

    def _fail(self, place: int, death: WorkerDiedError) -> None:
        """A process has died, or was ended as it is too late."""
        (grammar, parts, _), worker = self._asked[place], self._workers[place]
        self._forget(place)
        _LOG.warning("a grammar's process %s; its rows start again with another process", death)
        if grammar.worker is worker:
            grammar.worker = None
        grammar.more = [each for each in grammar.more if each is not worker]
        if grammar.waiting is None:
            self._start_repair(grammar, parts, death.cause)
        else:  # another of its processes has died just now
            grammar.waiting += parts
        assert grammar.waiting is not None
        grammar.waiting += self._next.pop(place, [])

    def _start_repair(self, grammar: FollowedGrammar, parts: list[AskedMasks], cause: ErrorCause) -> None:
        grammar.waiting = []
        future = self._on_a_thread(partial(self._repair.follow_anew, grammar, parts, cause))
        self._repairs[future] = grammar, parts

    def _spread_later(self, grammar: FollowedGrammar) -> None:
        grammar.is_growing = True
        self._repairs[self._on_a_thread(partial(self._repair.new_worker, grammar))] = grammar, []

    def _on_a_thread(self, work: Callable[[], GrammarWorker | None]) -> Future[GrammarWorker | None]:
        """Run something on a thread; the bell rings when it is done."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_REPAIRS, "realizar-masks")
        future = self._threads.submit(work)
        future.add_done_callback(lambda _future: os.write(self._ring, b"r"))
        return future

    def _take_repairs(self) -> None:
        os.read(self._bell, 1 << 12)
        for future in [each for each in self._repairs if each.done()]:
            grammar, parts = self._repairs.pop(future)
            failure = future.exception()
            if failure is not None:
                _LOG.error("masks could not be computed", exc_info=failure)
            elif (worker := future.result()) is not None:
                grammar.add_worker(worker)
            if not parts:
                grammar.is_growing = False
                self._spread.added()
                continue
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
        if starts and row.worker is not None:
            row.worker.close_row(row.key)
        token_ids = tuple(row.output if starts else row.output[row.num_sent :])
        steps.append(RowStep(row.key, starts, token_ids, part.drafts, part.place))
        row.worker, row.num_sent = worker, len(row.output)
    return Step(tuple(steps), worker.take_closed(), memory.size_bytes)


def placed_worker(row: FollowedRow) -> GrammarWorker | None:
    """The process that is to compute a row's masks: its own, unless another one has far fewer rows."""
    grammar = row.grammar
    if not grammar.more:
        row.place(grammar.worker)
        return grammar.worker
    workers = grammar.workers
    least = min(workers, key=lambda worker: worker.num_rows)
    if row.placed not in workers or row.placed.num_rows > least.num_rows + 2:
        row.place(least)
    return row.placed
