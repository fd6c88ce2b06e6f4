"""`WorkerProcess` runs in a worker's process: it compiles grammars, and follows the rows that it is given."""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from realizar.errors import RealizarError
from realizar.ipc.frames import Channel, ChannelError
from realizar.ipc.process_limits import limit_process, within
from realizar.structured.grammar import Grammar, GrammarFactory, GrammarMatcher, only_id
from realizar.structured.known_states import UNKNOWN, KnownStates
from realizar.structured.regex_masks import MOST_STATES
from realizar.structured.workers.mask_memory import (
    ENDED,
    GOES_ON,
    MOST_TOKENS,
    NO_RING,
    STUCK,
    MaskMemory,
    entry_of,
    fence,
)
from realizar.structured.workers.messages import (
    Drop,
    Dropped,
    Explore,
    Follow,
    Heavy,
    Leave,
    Load,
    Loaded,
    Refused,
    Stuck,
    ToWorker,
    WantLines,
)

_FEW_ANSWERS = 200  # before all states of a grammar are looked for, which takes as long as some hundred answers
_HEAVY_S, _HEAVY_ANSWERS = 5e-3, 16  # so many answers of a grammar that take the processor for longer delay others
_HEAVY_BYTES = 64 << 20  # of a grammar, beyond what compiling it took


@dataclass(eq=False, slots=True)
class _Loaded:
    """A grammar of this worker.

    Attributes:
        number: its name in messages.
        num_answers: masks that its rows were given. next_wish: so many, and lines for its states are asked for.
        num_heavy: answers that took long. used_bytes: memory that answers took. is_reported: `Heavy` was sent.
        states: its known states; None where they have not been looked for. first_line: of the shared memory.
        search: looks for the states.
    """

    number: int
    grammar: Grammar
    num_answers: int = 0
    next_wish: int = _FEW_ANSWERS
    num_heavy: int = 0
    used_bytes: int = 0
    is_reported: bool = False
    states: KnownStates | None = None
    first_line: int = 0
    search: Iterator[None] = field(default_factory=lambda: iter(()))


@dataclass(eq=False, slots=True)
class _Row:
    """A row that is followed.

    Attributes:
        forced: tokens after the last answer that are certain, as the grammar allows no others.
        ahead: a matcher that has taken in the first of these. goes_on: it is to take in the last one too.
        mask: of the token after them all; None where it has not been computed.
        number: of the last request.
        last_s: seconds of the processor that the last answer took.
    """

    key: int
    slot: int
    loaded: _Loaded
    matcher: GrammarMatcher
    forced: list[int] = field(default_factory=list)
    ahead: GrammarMatcher | None = None
    goes_on: bool = False
    mask: NDArray[np.uint32] | None = None
    number: int = 0
    last_s: float = 0.0

    def take_in(self, token_ids: Sequence[int]) -> NDArray[np.uint32] | None:
        """Take in sampled ids; returns the mask after them if it is known, as they are those that were forced."""
        mask = self.mask if token_ids == self.forced else None
        if mask is not None and self.ahead is not None:
            self.matcher = self.ahead
        else:
            self.matcher.advance(token_ids)  # others may have been sampled after the end before that was known
        self.forced, self.ahead, self.goes_on, self.mask = [], None, False, None
        return mask


class WorkerProcess:
    """Some grammars and rows of them. The process ends when the engine closes the channel.

    What it works on stands in the shared memory, at `place`, so that a grammar that ends the process is known.
    `memory_bytes` may be allocated in addition to the memory at the start.
    """

    def __init__(
        self, channel: Channel[ToWorker], factory: GrammarFactory, memory: MaskMemory, place: int, memory_bytes: int
    ) -> None:
        self._channel, self._factory, self._memory, self._place = channel, factory, memory, place
        self._news: select.epoll | None = None
        if memory.ring != NO_RING:
            self._news = select.epoll()
            self._news.register(channel.fileno(), select.EPOLLIN)
            self._news.register(memory.ring, select.EPOLLIN | select.EPOLLET)
        self._grammars: dict[int, _Loaded] = {}
        self._load_bytes = 0  # the most that compiling one has taken; others may be in memory that was free again
        self._rows: dict[int, _Row] = {}  # by slot
        # Single cells of arrays take several times as long.
        self._working, self._progress = memory.working.data, memory.progress.data
        self._asked, self._answered, self._keys = memory.asked.data, memory.answered.data, memory.keys.data
        self._states, self._known = memory.states.data, memory.known.data
        self._num_tokens, self._num_drafts = memory.num_tokens.data, memory.num_drafts.data
        self._most_forced = min(memory.most_drafts + 1, MOST_TOKENS) if memory.most_drafts else MOST_TOKENS
        limit_process(memory_bytes)

    def run(self) -> None:
        """Do what messages say and answer requests, until the engine closes its end."""
        try:
            while True:
                self._take_in()
                if not (self._answer_all() or self._go_ahead() or self._explore()):
                    self._sleep()
        except ChannelError:
            pass

    def _sleep(self) -> None:
        """Wait for a message. For a request, a worker that sleeps is sent one, or hears the ring."""
        self._memory.sleeping[self._place] = 1
        fence()
        if not self._asking():
            self._wait()
        self._memory.sleeping[self._place] = 0

    def _wait(self) -> None:
        """Wait for a message or the ring, of which nobody takes anything back, so that each write wakes all."""
        if self._news is None:
            self._channel.wait()
        elif not self._channel.has_record:
            self._news.poll()

    def _work_on(self, what: int) -> None:
        self._working[self._place] = what
        self._progress[self._place] += 1

    def _take_in(self) -> None:
        while (record := self._channel.receive_now()) is not None:
            if isinstance(record, Load):
                self._load(record)
            elif isinstance(record, Drop):
                self._grammars.pop(record.grammar, None)
                self._channel.send(Dropped(record.grammar))
            elif isinstance(record, Explore):
                self._begin_search(record)
            elif isinstance(record, Follow):
                self._follow(record)
            elif isinstance(record, Leave):
                self._leave(record)

    def _load(self, command: Load) -> None:
        self._work_on(-command.grammar)
        # The process's clock goes by the system's ticks while its time is limited.
        before_s, before_bytes = time.thread_time(), _most_resident_bytes()
        limit_cpu(command.cpu_s)
        try:
            grammar = self._factory.compile(command.structured)
        except RealizarError as error:
            self._channel.send(Refused(str(error), command.grammar))
        else:
            self._grammars[command.grammar] = _Loaded(command.grammar, grammar)
            used_s = time.thread_time() - before_s
            self._load_bytes = max(self._load_bytes, _most_resident_bytes() - before_bytes)
            self._channel.send(Loaded(command.grammar, self._load_bytes, used_s))
        limit_cpu(None)
        self._work_on(0)

    def _follow(self, command: Follow) -> None:
        loaded = self._grammars.get(command.grammar)
        if loaded is None:
            return  # it was refused, which the engine hears
        self._work_on(command.key)
        matcher = loaded.grammar.start(command.token_ids)
        self._rows[command.slot] = _Row(command.key, command.slot, loaded, matcher)
        self._work_on(0)

    def _leave(self, command: Leave) -> None:
        """Forget a row. If it has a request, that is answered with what is there: nobody reads it."""
        row, memory, slot = self._rows.get(command.slot), self._memory, command.slot
        if row is None or row.key != command.key:
            return
        del self._rows[slot]
        asked, answered = memory.asked[slot], memory.answered[slot]
        fence()
        if memory.keys[slot] == command.key and asked != answered:  # else the slot may be another row's at any time
            memory.answered[slot] = asked

    def _asking(self) -> list[_Row]:
        memory = self._memory
        slots = (memory.asked != memory.answered).nonzero()[0].tolist()
        fence()
        rows = [self._rows[slot] for slot in slots if slot in self._rows]
        return [row for row in rows if self._keys[row.slot] == row.key]

    def _answer_all(self) -> int:
        asking = self._asking()
        if not asking:
            return 0
        asking.sort(key=_last_s)  # what took long takes long again: others wait
        before_s, before_bytes = time.thread_time(), _most_resident_bytes()
        for row in asking:
            self._work_on(row.key)
            self._answer(row)
            now_s = time.thread_time()
            row.last_s = now_s - before_s
            before_s = now_s
        longest = max(asking, key=_last_s).loaded
        longest.used_bytes += _most_resident_bytes() - before_bytes  # memory that is new takes time
        for row in asking:
            self._note(row.loaded, row.last_s)
        return len(asking)

    def _note(self, loaded: _Loaded, answer_s: float) -> None:
        """Count an answer, and report a grammar that is a burden to others."""
        loaded.num_answers += 1
        loaded.num_heavy += answer_s > _HEAVY_S
        if (loaded.num_heavy >= _HEAVY_ANSWERS or loaded.used_bytes > _HEAVY_BYTES) and not loaded.is_reported:
            loaded.is_reported = True
            self._channel.send(Heavy(loaded.number, loaded.used_bytes))

    def _answer(self, row: _Row) -> None:
        memory, slot, states = self._memory, row.slot, row.loaded.states
        number = self._asked[slot]
        fence()
        if self._keys[slot] != row.key:
            self._working[self._place] = 0
            return  # the slot is another row's
        row.number = number
        known_mask = row.take_in(memory.tokens[slot, : self._num_tokens[slot]].tolist())
        matcher = row.matcher
        if (num_drafts := self._num_drafts[slot]) > 0:
            masks = np.empty((num_drafts + 1, self._factory.num_words), np.uint32)
            self._factory.fill(matcher, memory.drafts[slot, :num_drafts].tolist(), masks)
            memory.masks[slot], memory.masks_after_drafts[slot, :num_drafts] = masks[0], masks[1:]
        elif known_mask is not None:
            memory.masks[slot] = known_mask
        else:
            self._factory.fill(matcher, (), memory.masks[slot : slot + 1])
        self._find_forced(row, matcher, memory.masks[slot])
        state = STUCK if matcher.error is not None else ENDED if matcher.ended else GOES_ON
        if state == STUCK:
            self._channel.send(Stuck(row.key, str(matcher.error)))
        self._states[slot] = state
        known = UNKNOWN if states is None else states.find(matcher)
        self._known[slot] = 0 if known == UNKNOWN else entry_of(row.number, row.loaded.first_line + known)
        self._working[self._place] = 0
        fence()
        self._answered[slot] = number

    def _find_forced(self, row: _Row, matcher: GrammarMatcher, mask: NDArray[np.uint32]) -> bool:
        """Write the next token of a row, after the forced ones, if its mask has no other; true if so."""
        token_id = None if matcher.ended or matcher.error is not None else only_id(mask)
        is_end, row.goes_on = token_id in self._factory.end_ids, False
        if token_id is None or len(row.forced) >= self._most_forced or (is_end and self._memory.most_drafts > 0):
            return False  # the end is no draft
        row.goes_on = not is_end
        self._memory.forced[row.slot, len(row.forced)] = entry_of(row.number, token_id)
        row.forced.append(token_id)
        return True

    def _go_ahead(self) -> int:
        """Find one more token of a row that can have no other, to the end of its output; returns how many rows."""
        row = next((each for each in self._rows.values() if each.goes_on), None)
        if row is None:
            return 0
        self._work_on(row.key)
        if row.ahead is None:
            row.ahead = row.matcher.copy()
        row.ahead.advance(row.forced[-1:])
        mask = np.empty((1, self._factory.num_words), np.uint32)
        self._factory.fill(row.ahead, (), mask)
        if not self._find_forced(row, row.ahead, mask[0]):
            row.mask = mask[0]
        self._work_on(0)
        return 1

    def _begin_search(self, command: Explore) -> None:
        loaded = self._grammars.get(command.grammar)
        if loaded is not None and loaded.states is None:
            lines, memory = slice(command.first, command.first + MOST_STATES), self._memory
            masks = memory.masks[memory.num_slots :][lines]
            loaded.states = KnownStates(loaded.grammar, self._factory, masks, memory.after[lines])
            loaded.first_line, loaded.search = command.first, loaded.states.explore()

    def _explore(self) -> bool:
        """Find out, one part of the work, what rows will need; true if there may be more."""
        for loaded in self._grammars.values():
            if loaded.states is not None:
                self._work_on(-loaded.number)
                if next(loaded.search, self) is not self:
                    self._work_on(0)
                    return True
            elif loaded.num_answers >= loaded.next_wish and loaded.grammar.shared is not None:
                loaded.next_wish = loaded.num_answers + _FEW_ANSWERS  # all lines may be others' now, and free later
                if len(self._memory.after):
                    self._channel.send(WantLines(loaded.number))
        self._work_on(0)
        return False


def _last_s(row: _Row) -> float:
    return row.last_s


def _most_resident_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def limit_cpu(cpu_s: int | None) -> None:
    """Have the kernel end this process after `cpu_s` more seconds of processor time; None removes the limit."""
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = hard
    if cpu_s is not None:
        soft = within(int(sum(os.times()[:2])) + cpu_s, hard)
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
