"""`WorkerPool`: the workers that follow rows, which grammar is loaded where, and which worker gets a row."""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable

from realizar.ipc.frames import ChannelError
from realizar.structured.regex_masks import MOST_STATES
from realizar.structured.workers.grammar_rows import NO_LINE, KnownGrammar
from realizar.structured.workers.mask_memory import NO_RING
from realizar.structured.workers.messages import (
    Drop,
    Dropped,
    Explore,
    FromWorker,
    Heavy,
    Load,
    Loaded,
    Look,
    Refused,
    Stuck,
    WantLines,
)
from realizar.structured.workers.worker import ServerError, Worker, WorkerDiedError, WorkerFactory, WorkerLimits

_LOOKS = 20  # at the clock, in the time in which a worker must get on
_FEW = 3  # workers that are sent a message each; the ring wakes those too that have nothing to do
_SLACK = 2  # more rows that a worker has which has the grammar already

Event = tuple[Worker, "FromWorker | WorkerDiedError"]


class WorkerPool:
    """Workers that grammars share, as many as the limits say, and those of grammars that have one of their own.

    A grammar is compiled once in every worker that follows its rows. Not thread-safe, but for `drop`.
    """

    def __init__(self, factory: WorkerFactory, limits: WorkerLimits) -> None:
        self._factory, self._limits = factory, limits
        self.clock: Callable[[], float] = time.monotonic
        self._memory = factory.memory
        self.workers: dict[int, Worker] = {}  # by descriptor
        self._ended: list[Worker] = []  # whose channel has ended, and whose end is not explained yet
        self.grammars: dict[int, KnownGrammar] = {}
        self._poll = select.poll()
        self._free_lines = list(range(0, len(self._memory.after), MOST_STATES))
        self._dropped: deque[KnownGrammar] = deque()
        self._looked_s = self.clock()

    def place(self, grammar: KnownGrammar) -> Worker | None:
        """The worker that is to follow a row of a grammar; None while there is none. ServerError: there can't be."""
        if grammar.compiled_in is not None:
            self.grammars[grammar.number] = grammar
            worker_of_it, grammar.compiled_in = grammar.compiled_in, None
            self._watch(worker_of_it)
        fitting, most = self._fitting(grammar), 1 if grammar.is_alone else self._limits.workers
        best = min(fitting, key=lambda each: _cost(each, grammar), default=None)
        if best is None or (len(fitting) < most and _cost(best, grammar) > _SLACK):
            try:
                best = self._new(grammar) or best
            except ServerError:
                if best is None:
                    raise
        if best is None:
            return None
        if grammar.number not in best.grammars:
            self.grammars[grammar.number] = grammar
            best.grammars.add(grammar.number)
            grammar.copies += 1
            best.num_loading += 1
            best.post(Load(grammar.number, grammar.structured, self._limits.compile_cpu_s))
        return best

    def wake(self, workers: set[Worker]) -> None:
        memory = self._memory
        sleeping = [worker for worker in workers if memory.sleeping[worker.place]]
        if len(sleeping) > _FEW and memory.ring != NO_RING:
            os.eventfd_write(memory.ring, 1)
            return
        for worker in sleeping:
            worker.post(Look())

    def drop(self, grammar: KnownGrammar) -> None:
        """No row will follow a grammar any more. Any thread may call this."""
        self._dropped.append(grammar)

    def poll(self) -> tuple[list[Event], bool]:
        """What workers tell and how they end, and whether there was anything. Waits for nothing."""
        events = list[Event]()
        ready = self._poll.poll(0)
        for descriptor, _ in ready:
            events += self._receive(self.workers[descriptor])
        for worker in self._ended[:]:
            if (death := worker.death()) is not None:
                self._ended.remove(worker)
                self._forget(worker)
                events.append((worker, death))
        while self._dropped:
            self._unload(self._dropped.popleft())
        now_s = self.clock()
        if now_s >= self._looked_s + min(self._limits.stall_s, self._limits.step_s) / _LOOKS:
            self._look(now_s - self._looked_s)
            self._looked_s = now_s
        return events, bool(ready or events)

    def close(self) -> None:
        while self._dropped:
            self._unload(self._dropped.popleft())
        for worker in (*self.workers.values(), *self._ended):
            self._factory.end(worker)
        self.workers.clear()
        self._ended.clear()

    def _fitting(self, grammar: KnownGrammar) -> list[Worker]:
        owner = grammar.number if grammar.is_alone else 0
        return [each for each in self.workers.values() if each.owner == owner and not each.is_doomed]

    def _new(self, grammar: KnownGrammar) -> Worker | None:
        """One more worker for a grammar; None while the fork server is being started. Raises ServerError."""
        memory_bytes = self._limits.memory_bytes + (0 if grammar.is_alone else self._limits.total_bytes)
        worker = self._factory.new(memory_bytes, may_wait=False)
        if worker is not None:
            worker.owner = grammar.number if grammar.is_alone else 0
            self._watch(worker)
        return worker

    def _watch(self, worker: Worker) -> None:
        self.workers[worker.channel.fileno()] = worker
        self._poll.register(worker.channel.fileno(), select.POLLIN)

    def _receive(self, worker: Worker) -> list[Event]:
        events = list[Event]()
        try:
            while (record := worker.channel.receive_now()) is not None:
                if self._note(worker, record):
                    events.append((worker, record))
        except ChannelError:
            del self.workers[worker.channel.fileno()]
            self._poll.unregister(worker.channel.fileno())
            worker.is_doomed = True
            self._ended.append(worker)
        return events

    def _note(self, worker: Worker, record: FromWorker) -> bool:
        """Take in what a worker tells; true if it is about rows."""
        if isinstance(record, Stuck):
            return True
        grammar = self.grammars.get(record.grammar)
        if grammar is None:
            return False
        if isinstance(record, Loaded):
            worker.num_loading -= 1
            grammar.num_failed_loads = 0
        elif isinstance(record, Refused):
            worker.num_loading -= 1
            self._release(worker, grammar)
        elif isinstance(record, Dropped):
            self._release(worker, grammar)
        elif isinstance(record, Heavy):
            grammar.memory_bytes += record.memory_bytes
        elif isinstance(record, WantLines):
            self._give_lines(worker, grammar)
        return isinstance(record, Refused | Heavy)

    def _give_lines(self, worker: Worker, grammar: KnownGrammar) -> None:
        """Give a grammar lines for its known states, if some are free. All its workers share them."""
        if grammar.first_line == NO_LINE and self._free_lines and not grammar.is_dropped:
            grammar.first_line = self._free_lines.pop()
            self._memory.versions[grammar.first_line : grammar.first_line + MOST_STATES] += 1
        if grammar.first_line != NO_LINE:
            worker.post(Explore(grammar.number, grammar.first_line))

    def _unload(self, grammar: KnownGrammar) -> None:
        grammar.is_dropped = True
        if grammar.compiled_in is not None:
            self._factory.end(grammar.compiled_in)
        for worker in self.workers.values():
            if worker.owner == grammar.number:
                worker.is_doomed = worker.is_dismissed = True
                worker.kill()
            elif grammar.number in worker.grammars:
                worker.post(Drop(grammar.number))
        self._forget_dropped(grammar)

    def _release(self, worker: Worker, grammar: KnownGrammar) -> None:
        worker.grammars.discard(grammar.number)
        grammar.copies -= 1
        self._forget_dropped(grammar)

    def _forget_dropped(self, grammar: KnownGrammar) -> None:
        """Forget a grammar that is dropped once no worker has it, or writes to its lines."""
        if not grammar.is_dropped or grammar.copies:
            return
        self.grammars.pop(grammar.number, None)
        if grammar.first_line != NO_LINE:
            self._free_lines.append(grammar.first_line)
            grammar.first_line = NO_LINE

    def _forget(self, worker: Worker) -> None:
        for number in tuple(worker.grammars):
            self._release(worker, self.grammars[number])
        self._factory.end(worker)

    def _look(self, elapsed_s: float) -> None:
        """End the workers that have not got on with anything in time."""
        memory, limits = self._memory, self._limits
        for worker in self.workers.values():
            worker.flush()
            progress = int(memory.progress[worker.place])
            slots = list(worker.slots)
            has_work = worker.num_loading > 0 or bool((memory.asked[slots] != memory.answered[slots]).any())
            if progress != worker.progress or not has_work or worker.is_doomed:
                worker.progress, worker.stalled_s = progress, 0.0
                continue
            limit_s = limits.stall_s
            if worker.owner:
                limit_s = limits.compile_s if worker.num_loading else limits.step_s
            worker.stalled_s += min(elapsed_s, limit_s / 4)  # this thread may have been away for some time
            if worker.stalled_s >= limit_s:
                worker.end_late(limit_s)


def _cost(worker: Worker, grammar: KnownGrammar) -> int:
    return len(worker.slots) + (0 if grammar.number in worker.grammars else _SLACK)
