"""`StepMasks` asks the grammars' processes for masks and takes them in, without waiting for any one of them."""

from __future__ import annotations

import heapq
import logging
import select
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from realizar.errors import RequestFailedError
from realizar.outputs import ErrorCause
from realizar.structured.workers.cells import Cells
from realizar.structured.workers.chosen import ChosenTokens
from realizar.structured.workers.followed import FollowedGrammar, FollowedRow
from realizar.structured.workers.foreseen import ForeseenMasks
from realizar.structured.workers.mask_memory import GOES_ON, STUCK, fence
from realizar.structured.workers.messages import Slow, Stuck
from realizar.structured.workers.questions import Questions
from realizar.structured.workers.repair import Repair
from realizar.structured.workers.repair_threads import Repaired, RepairThreads
from realizar.structured.workers.spread import Spread
from realizar.structured.workers.worker import GrammarWorker, WorkerDiedError

_LOG = logging.getLogger(__name__)
_NAP_S, _LONGEST_NAP_S = 2e-5, 1e-3
_LOOKS = 100  # at the clock, in the time in which a process must answer

Slots = NDArray[np.intp]


class StepMasks:
    """The rows that follow grammars, and what is asked of each, in columns by slot. Not thread-safe.

    A step's questions are a few writes to the shared memory and one ring of a bell, its answers two numbers to compare.
    What is known beforehand costs no question (`ForeseenMasks`): where the grammar leaves no choice its process goes
    ahead of what is chosen, and of small expressions the process knows all states. A process that dies or does not
    answer in time is replaced on another thread, while the rows of others go on.

    Attributes:
        wanted: bool [slots], masks of the row's next choice are asked for.

    Args:
        questions: puts rows before processes.
        repair: follows rows anew whose process has died, and adds processes.
        most_more: processes that grammars may have beyond one each, of all together.
        clock: seconds, monotonic.
    """

    def __init__(
        self, questions: Questions, repair: Repair, most_more: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._questions, self._repair, self._clock = questions, repair, clock
        self.memory = memory = questions.memory
        count = memory.num_slots
        self._free = list(range(count))
        self._rows: list[FollowedRow | None] = [None] * count
        self.wanted = np.zeros(count, np.bool_)
        self._failed = np.zeros(count, np.bool_)  # rows with an error
        self._unasked = np.zeros(count, np.bool_)  # rows whose question is not there yet
        self._need_care = np.zeros(count, np.bool_)  # rows whose process may have to change
        self._stale = np.zeros(count, np.bool_)  # rows whose process lacks tokens
        self._num_new = np.zeros(count, np.int32)  # tokens since the last question
        self._asked_s = np.zeros(count, np.float64)
        self._foreseen = ForeseenMasks(memory)
        own = (self._unasked, self._failed, self._need_care, self._stale, self._num_new)
        self._cells = Cells.of(memory, *(column.data for column in own))
        self._chosen = ChosenTokens(self._cells, self._foreseen)
        self._seen = b""  # of `memory.answered`
        self._later: list[FollowedRow] = []  # rows to be asked about once their last question is answered
        self._closed: list[FollowedRow] = []  # rows that are closed, and whose slots are still in use
        self._posted: list[int] = []  # slots whose processes are to be woken
        self._watched: dict[int, tuple[FollowedGrammar, GrammarWorker]] = {}  # by descriptor
        self._next_look_s = 0.0
        self._poll = select.poll()
        self._spread = Spread(most_more, self._spread_later)
        self._repairs: dict[Repaired, tuple[FollowedGrammar, list[FollowedRow]]] = {}
        self._threads = RepairThreads()
        self._poll.register(self._threads.fileno(), select.POLLIN)

    def open(self, grammar: FollowedGrammar, output: Sequence[int]) -> FollowedRow:
        """A row that follows a grammar after some output. Raises RequestFailedError."""
        if not self._free:
            raise RequestFailedError(f"{self.memory.num_slots} rows follow grammars, or did a moment ago")
        slot = heapq.heappop(self._free)
        self._rows[slot] = row = FollowedRow(slot, grammar, list(output))
        self._chosen.outputs[slot] = row.output
        for column in (self.wanted, self._failed, self._unasked, self._stale, self._num_new):
            column[slot] = 0
        self._foreseen.forget(slot)
        self._need_care[slot], self.memory.states[slot] = True, GOES_ON
        if not output:
            self._begin(row)
        return row

    def _begin(self, row: FollowedRow) -> None:
        """A row without output may be where others have been."""
        others = [each.slot for each in self._rows if each is not None and each.grammar is row.grammar]
        self._foreseen.begin(row.slot, others)

    def close(self, row: FollowedRow) -> None:
        """End a row, which is placed nowhere any more. Its slot is free once nobody writes to it."""
        row.closed = True
        self.wanted[row.slot] = False
        if row.worker is not None:
            row.worker.leave(row.key)
        self._closed.append(row)
        self._let_go()

    def fail(self, row: FollowedRow, reason: str, cause: ErrorCause) -> None:
        """Put a row in error."""
        row.fail(reason, cause)
        self._failed[row.slot] = True

    def ask(self, slots: Slots, drafts: Mapping[int, tuple[int, ...]]) -> None:
        """Ask for masks of rows, and of some rows' drafts, by slot; returns at once. See `are_done`."""
        self.wanted[slots] = True
        cells, foreseen = self._cells, self._foreseen
        together, alone = list[int](), list[int]()
        for slot in slots.tolist():
            if foreseen.is_known(slot):
                continue
            if cells.need_care[slot] or cells.failed[slot] or not cells.is_answered(slot) or slot in drafts:
                alone.append(slot)
            elif not foreseen.write_certain(slot, cells.num_new[slot]):
                cells.num_drafts[slot] = 0
                together.append(slot)
        for slot in together:
            self._chosen.name(slot)
        if together:
            self._post(np.array(together))
        for slot in alone:
            row = self._row(slot)
            row.drafts = drafts.get(slot, ())
            self._ask_alone(row)
        self._wake()

    def are_done(self, slots: Slots) -> NDArray[np.bool_]:
        """bool [rows], rows whose masks are there, or that have an error."""
        cells, those, is_known = self._cells, slots.tolist(), self._foreseen.is_known
        done = [cells.is_answered(slot) for slot in those]
        fence()
        for at, slot in enumerate(those):
            if done[at] and cells.states[slot] == STUCK and not cells.failed[slot]:
                self._learn(self._row(slot))
            done[at] = done[at] or is_known(slot)
        return np.array(done, np.bool_) | self._failed[slots]

    def certain_ids(self, slot: int, most: int) -> tuple[int, ...]:
        """The next tokens of a row that its grammar forces, `most` at the most, as far as they were found."""
        cells = self._cells
        return self._foreseen.certain_ids(slot, cells.num_new[slot], most) if cells.is_reported(slot) else ()

    def are_failed(self, slots: Slots) -> NDArray[np.bool_]:
        """bool [rows], rows that have an error."""
        return self._failed[slots]

    def advance(self, slots: Slots, choices: NDArray[np.int32], counts: NDArray[np.intp]) -> None:
        """Take in the choices of rows, int32 [rows, most choices], so many of each; earlier masks are used up."""
        self.wanted[slots] = False
        for slot, token_ids, count in zip(slots.tolist(), choices.tolist(), counts.tolist(), strict=True):
            self._chosen.take_in(slot, token_ids[:count])

    def wait(self, timeout_s: float) -> None:
        """Take in what there is; where nothing has come, wait for the first masks or news, `timeout_s` at most."""
        now_s = self._clock()
        end_s, nap_s = now_s + timeout_s, _NAP_S
        while True:
            ready = self._poll.poll(0)
            for place, _ in ready:
                if place == self._threads.fileno():
                    self._take_repairs()
                else:
                    self._take_news(place)
            self._let_go()
            if now_s >= self._next_look_s:
                self._end_late(now_s)
            self._wake()
            if ready or self.memory.answered.tobytes() != self._seen:
                self._seen = self.memory.answered.tobytes()
                return
            if (now_s := self._clock()) >= end_s:
                return
            time.sleep(min(nap_s, end_s - now_s))
            nap_s = min(1.5 * nap_s, _LONGEST_NAP_S)

    def close_all(self) -> None:
        """End the threads; all processes have been ended. Idempotent."""
        self._threads.close()
        for repaired in self._repairs:
            if repaired.exception() is None and (worker := repaired.result()) is not None:
                worker.close()
        self._repairs.clear()

    @property
    def num_repairs(self) -> int:
        """Processes that are being replaced or added."""
        return len(self._repairs)

    def _row(self, slot: int) -> FollowedRow:
        row = self._rows[slot]
        assert row is not None
        return row

    def _post(self, slots: Slots) -> None:
        self._asked_s[slots] = self._clock()
        self._questions.post(slots)
        self._posted += slots.tolist()

    def _wake(self) -> None:
        """Wake the processes of rows that have new questions."""
        posted, self._posted = self._posted, []
        if posted and self._questions.bell.rings:
            self._questions.bell.ring()
            return
        rows = [row for slot in posted if (row := self._rows[slot]) is not None]
        for worker in {row.worker for row in rows if row.worker is not None}:
            try:
                worker.look()
            except WorkerDiedError as death:
                self._fail(worker, death)

    def _ask_alone(self, row: FollowedRow) -> None:
        """Ask for one row's masks, as soon as there is a process that can be asked."""
        slot, grammar = row.slot, row.grammar
        self._unasked[slot] = not (row.closed or self._failed[slot])
        if not self._unasked[slot]:
            return
        if grammar.waiting is not None:
            if row not in grammar.waiting:  # it may have waited to tell what it chose, and wants masks by now
                grammar.waiting.append(row)
            return
        if self._cells.is_in_use(slot):
            if row not in self._later:
                self._later.append(row)
            return
        if (worker := row.find_place()) is None:
            self._start_repair(grammar, [row], "engine")
            return
        if row.worker is not worker or self._stale[slot]:
            self._watch(grammar, worker)
            try:
                self._questions.follow(row, worker)
            except WorkerDiedError as death:
                row.worker = worker
                self._fail(worker, death)
                return
            self._stale[slot], self._num_new[slot] = False, 0
        else:
            self._chosen.name(slot)
        self._need_care[slot] = self._unasked[slot] = False
        self._questions.name_drafts(row)
        self._post(np.array([slot]))

    def _let_go(self) -> None:
        """Go on with rows whose last question is answered: ask about them, or free their slots."""
        for row in [each for each in self._later if not self._cells.is_in_use(each.slot)]:
            self._later.remove(row)
            self._ask_alone(row)
        for row in [each for each in self._closed if self._cells.is_answered(each.slot)]:
            self._closed.remove(row)
            self._rows[row.slot] = None
            heapq.heappush(self._free, row.slot)
            if row.worker is not None:
                self._unwatch_idle(row.worker)

    def _watch(self, grammar: FollowedGrammar, worker: GrammarWorker) -> None:
        """Hear of what the process tells, as long as it has rows."""
        if not worker.is_followed:
            worker.is_followed = True
            self._watched[worker.fileno()] = grammar, worker
            self._poll.register(worker.fileno(), select.POLLIN)

    def _unwatch_idle(self, worker: GrammarWorker) -> None:
        if not worker.num_rows and not any(row is not None and row.worker is worker for row in self._rows):
            self._unwatch(worker)

    def _unwatch(self, worker: GrammarWorker) -> None:
        for place in [place for place, (_, each) in self._watched.items() if each is worker]:
            del self._watched[place]
            self._poll.unregister(place)
        worker.is_followed = False

    def _take_news(self, place: int) -> None:
        """Take in what a process tells, by its descriptor."""
        if place not in self._watched:
            return  # it failed a moment ago
        grammar, worker = self._watched[place]
        try:
            news = worker.take_news()
        except WorkerDiedError as death:
            self._fail(worker, death)
            return
        for each in news:
            if isinstance(each, Slow):
                self._spread.note_slow(grammar)
            elif isinstance(each, Stuck):
                for row in [row for row in self._rows if row is not None and row.key == each.key]:
                    self.fail(row, each.reason, "request")

    def _learn(self, row: FollowedRow) -> None:
        """Hear why a row is stuck; its process has told."""
        if row.worker is not None and row.worker.is_followed:
            self._take_news(row.worker.fileno())
        if row.error is None and not self._unasked[row.slot]:
            self.fail(row, "its process has ended", "engine")

    def _end_late(self, now_s: float) -> None:
        """End the processes that have not answered in time."""
        memory, step_s = self.memory, self._questions.step_s
        self._next_look_s = now_s + step_s / _LOOKS
        late = (memory.asked != memory.answered) & ~self._unasked & (self._asked_s + step_s <= now_s)
        for slot in late.nonzero()[0].tolist():
            row = self._rows[slot]
            if row is not None and row.worker is not None and self._cells.is_in_use(row.slot):
                self._fail(row.worker, row.worker.late(step_s))

    def _fail(self, worker: GrammarWorker, death: WorkerDiedError) -> None:
        """A process has died, or was ended as it is too late."""
        grammar = next(grammar for grammar, each in self._watched.values() if each is worker)
        self._unwatch(worker)
        _LOG.warning("a grammar's process %s; its rows start again with another process", death)
        if grammar.worker is worker:
            grammar.worker = None
        grammar.more = [each for each in grammar.more if each is not worker]
        unanswered = []
        is_known = self._foreseen.is_known
        for row in [row for row in self._rows if row is not None and row.grammar is grammar]:
            if row.worker is not worker and (row.worker is not None or not is_known(row.slot)):
                continue  # it is another process's, or is being followed anew; a row may know its state and have none
            asks = self._unasked[row.slot] or self._cells.is_in_use(row.slot) or is_known(row.slot)
            self._foreseen.forget(row.slot)
            self._questions.answer_for(np.array([row.slot]))
            self._need_care[row.slot], row.worker = True, None
            if asks and self.wanted[row.slot]:
                unanswered.append(row)
        self._later = [row for row in self._later if row not in unanswered]
        if grammar.waiting is not None:  # another of its processes has died just now
            self._unasked[[row.slot for row in unanswered]] = True
            grammar.waiting += [row for row in unanswered if row not in grammar.waiting]
        elif unanswered:
            self._start_repair(grammar, unanswered, death.cause)

    def _start_repair(self, grammar: FollowedGrammar, rows: list[FollowedRow], cause: ErrorCause) -> None:
        grammar.waiting = []
        slots = [row.slot for row in rows]
        self._unasked[slots], self._num_new[slots] = True, 0
        self._stale[slots] = False
        repaired = self._threads.run(partial(self._repair.follow_anew, grammar, rows, cause))
        self._repairs[repaired] = grammar, rows

    def _spread_later(self, grammar: FollowedGrammar) -> None:
        grammar.is_growing = True
        self._repairs[self._threads.run(partial(self._repair.new_worker, grammar))] = grammar, []

    def _take_repairs(self) -> None:
        self._threads.take_in()
        for repaired in [each for each in self._repairs if each.done()]:
            grammar, rows = self._repairs.pop(repaired)
            failure = repaired.exception()
            if failure is not None:
                _LOG.error("masks could not be computed", exc_info=failure)
            elif (worker := repaired.result()) is not None:
                self._add(grammar, worker)
            if not rows:
                grammar.is_growing = False
                self._spread.added()
                continue
            for row in rows:
                if failure is not None:
                    row.fail(f"masks could not be computed: {type(failure).__name__}", "engine")
                self._failed[row.slot], self._unasked[row.slot] = row.error is not None, False
            waiting, grammar.waiting = grammar.waiting or [], None
            for row in waiting:
                self._ask_alone(row)

    def _add(self, grammar: FollowedGrammar, worker: GrammarWorker) -> None:
        """Let rows of the grammar go to a process."""
        grammar.add_worker(worker)
        self._watch(grammar, worker)
        self._need_care[[row.slot for row in self._rows if row is not None and row.grammar is grammar]] = True
        if not grammar.num_rows:
            self._unwatch_idle(worker)
