"""`MaskRequests` asks workers for masks of rows and takes them in, without waiting for any one of them."""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from realizar.errors import RequestFailedError
from realizar.outputs import ErrorCause
from realizar.structured.regex_masks import MOST_STATES
from realizar.structured.workers.grammar_rows import NO_LINE, GrammarRow, KnownGrammar
from realizar.structured.workers.mask_memory import GOES_ON, MOST_TOKENS, STUCK, MaskMemory, fence
from realizar.structured.workers.messages import Follow, Heavy, Leave, Refused, Stuck
from realizar.structured.workers.worker import ServerError, Worker, WorkerDiedError
from realizar.structured.workers.worker_pool import WorkerPool

_LOG = logging.getLogger(__name__)
_NAP_S, _LONGEST_NAP_S = 2e-5, 1e-3
_EVENTS_S = 5e-3  # between looks at what workers tell, where nothing is waited for
_MOST_LATE = 2  # workers of its own that a grammar may hold up, before all its rows are given up
_MOST_WAITS = 8  # workers that may end one after the other before a row has its masks, whatever ends them

Slots = NDArray[np.intp]


class MaskRequests:
    """The rows that follow grammars, and what is asked of each. Not thread-safe.

    A step's requests are a few writes to the shared memory, its answers two numbers to compare. What is known
    beforehand costs no request (`PrefetchedMasks`): where the grammar allows one token its worker goes ahead of what is
    sampled, and of small expressions it knows all states.

    When a worker ends, all its rows are followed anew in others. What it worked on says which grammar may have ended
    it: that one gets a worker of its own, and a row that ends this one too, at the same token, is in error; then
    `condemn` is called. A worker that does not get on in time is ended, and then it is the same.
    """

    def __init__(
        self, memory: MaskMemory, pool: WorkerPool, condemn: Callable[[KnownGrammar, str, ErrorCause], None]
    ) -> None:
        self.memory, self._pool, self._condemn = memory, pool, condemn
        count = memory.num_slots
        self._keys = itertools.count(1)
        self._free = list(range(count))
        self._rows: dict[int, GrammarRow] = {}  # by slot
        self._prefetched = PrefetchedMasks(memory)
        self.wanted = np.zeros(count, np.bool_)
        # Single cells of arrays take several times as long, and operations of numpy more than some rows by themselves.
        self._asked, self._answered, self._states = memory.asked.data, memory.answered.data, memory.states.data
        self._tokens, self._num_tokens, self._num_drafts = (
            memory.tokens.data, memory.num_tokens.data, memory.num_drafts.data
        )  # fmt: skip
        self._known = memory.known.data
        self._seen = b""  # of `memory.answered`
        self._next_events_s = 0.0
        self._failed = set[int]()  # slots of rows with an error
        self._due: dict[int, GrammarRow] = {}  # asked about once their last request is answered, or they have a worker
        self._closed: list[GrammarRow] = []  # rows that are closed, and whose slots are still in use

    def open(self, grammar: KnownGrammar, output: Sequence[int]) -> GrammarRow:
        """A row that follows a grammar after some output. Raises RequestFailedError."""
        if not self._free:
            raise RequestFailedError(f"{self.memory.num_slots} rows follow grammars, or did a moment ago")
        slot = heapq.heappop(self._free)
        row = self._rows[slot] = GrammarRow(slot, grammar, list(output))
        self.wanted[slot] = False
        self.memory.states[slot], self.memory.mask_indices[slot] = GOES_ON, slot
        if not output:  # it may be where others have been
            self._prefetched.begin(row, (each for each in self._rows.values() if each.grammar is grammar))
        if grammar.refusal is not None:
            self.fail(row, *grammar.refusal)
        return row

    def close(self, row: GrammarRow) -> None:
        """End a row. Its slot is free once nobody writes to it."""
        row.closed = True
        self.wanted[row.slot] = False
        if row.worker is not None:
            row.worker.post(Leave(row.key, row.slot))
        self._closed.append(row)
        self._go_on()

    def fail(self, row: GrammarRow, reason: str, cause: ErrorCause) -> None:
        row.error, row.cause = reason, cause
        self._failed.add(row.slot)
        self._due.pop(row.slot, None)

    def ask(self, slots: Slots, drafts: Mapping[int, tuple[int, ...]]) -> None:
        """Ask for masks of rows, and of some rows' drafts, by slot; returns at once. See `are_done`."""
        self.wanted[slots] = True
        rows, due, asked, answered = self._rows, self._due, self._asked, self._answered
        write_certain, ready = self._prefetched.write_certain, list[GrammarRow]()
        for slot in slots.tolist():
            row = rows[slot]
            if row.line != NO_LINE:
                continue
            row.drafts = drafts.get(slot, ()) if drafts else ()
            may_be_known = not row.is_stale and not row.drafts and asked[slot] == answered[slot] and slot not in due
            if not (may_be_known and row.num_new and write_certain(row)) and self._prepare(row):
                ready.append(row)
        self._post(ready)

    def are_done(self, slots: Slots) -> NDArray[np.bool_]:
        """bool [rows], rows whose masks are there, or that have an error."""
        memory, due = self.memory, self._due
        done: NDArray[np.bool_] = memory.asked[slots] == memory.answered[slots]
        fence()
        if due:
            done &= [slot not in due for slot in slots.tolist()]
        if np.count_nonzero(stuck := done & (memory.states[slots] == STUCK)):
            for slot in slots[stuck].tolist():
                if self._rows[slot].error is None:
                    self._take_reason(self._rows[slot])
        for at in (~done).nonzero()[0].tolist():
            row = self._rows[int(slots[at])]
            done[at] = row.line != NO_LINE or row.error is not None
        return done

    def are_answered(self, slots: Slots) -> bool:
        """True if the last requests of rows are all answered; a look that costs little."""
        return bool((self.memory.asked[slots] == self.memory.answered[slots]).all())

    def are_all_there(self, slots: Slots) -> bool:
        """True if the masks of all these rows are there, and none has an error; false also where that is not sure."""
        if self._due or self._failed or not self.are_answered(slots):
            return False
        fence()
        return not np.count_nonzero(self.memory.states[slots] == STUCK)

    def are_failed(self, slots: Slots) -> NDArray[np.bool_]:
        failed = self._failed
        return np.array([slot in failed for slot in slots.tolist()]) if failed else np.zeros(len(slots), np.bool_)

    def certain_ids(self, slot: int, most: int) -> tuple[int, ...]:
        """The next tokens of a row that its grammar forces, `most` at the most, as far as they were found."""
        row = self._rows[slot]
        if not self._is_answered(row) or row.is_stale or row.error is not None:
            return ()
        return self._prefetched.certain_ids(row, most)

    def advance(self, slots: Slots, sampled: NDArray[np.int32], counts: NDArray[np.intp]) -> None:
        """Take in the sampled tokens of rows, int32 [rows, most], so many of each; earlier masks are used up."""
        self.wanted[slots] = False
        known = self._known
        for slot, token_ids, count in zip(slots.tolist(), sampled.tolist(), counts.tolist(), strict=True):
            row, new = self._rows[slot], token_ids if count == len(token_ids) else token_ids[:count]
            row.output += new
            if row.line != NO_LINE or (known[slot] and not row.num_new and self._is_answered(row)):
                self._prefetched.take_in(row, new)
            row.num_new += count
            if row.num_new > MOST_TOKENS or slot in self._due:
                row.is_stale = True

    def wait(self, timeout_s: float) -> None:
        """Take in what there is; where nothing has come, wait for the first masks or events, `timeout_s` at most.

        Events are looked for each 5 ms, and before a nap.
        """
        now_s, nap_s = time.monotonic(), _NAP_S
        end_s = now_s + timeout_s
        while True:
            answered = self.memory.answered.tobytes()
            has_news, self._seen = answered != self._seen, answered
            if now_s >= self._next_events_s or not (has_news or now_s >= end_s):
                has_news |= self._take_events()
                self._next_events_s = now_s + _EVENTS_S
            self._go_on()
            if has_news or now_s >= end_s:
                return
            time.sleep(min(nap_s, end_s - now_s))
            nap_s = min(1.5 * nap_s, _LONGEST_NAP_S)
            now_s = time.monotonic()

    def _is_answered(self, row: GrammarRow) -> bool:
        return self._asked[row.slot] == self._answered[row.slot] and row.slot not in self._due

    def _post(self, rows: Sequence[GrammarRow]) -> None:
        """Let what was written be the next request of rows, and wake their workers."""
        if not rows:
            return
        fence()
        for row in rows:
            self._asked[row.slot] += 1
        fence()
        self._pool.wake({row.worker for row in rows if row.worker is not None})

    def _prepare(self, row: GrammarRow) -> bool:
        """Write a row's request, with its drafts; false if that is to be done later, or it has ended or failed."""
        slot = row.slot
        if self._due:
            self._due.pop(slot, None)
        if row.error is None and row.grammar.refusal is not None:
            self.fail(row, *row.grammar.refusal)
        if row.closed or row.error is not None:
            return False
        if self._asked[slot] != self._answered[slot] or (row.is_stale and not self._follow(row)):
            if row.error is None:
                self._due[slot] = row
            return False
        if (count := row.num_new) == 1:
            self._tokens[slot, 0] = row.output[-1]
        else:
            for place, token_id in enumerate(row.output[-count:] if count else ()):
                self._tokens[slot, place] = token_id
        self._num_tokens[slot], row.num_new = count, 0
        self._num_drafts[slot] = len(row.drafts)
        if row.drafts:
            self.memory.drafts[slot, : len(row.drafts)] = row.drafts
        return True

    def _follow(self, row: GrammarRow) -> bool:
        """Have a worker follow a row from its begin; false if there is none yet, or the row fails."""
        if row.worker is not None and row.worker.is_doomed:
            return False
        try:
            worker = self._pool.place(row.grammar)
        except ServerError as error:
            self.fail(row, f"it can't be compiled again: {error}", "engine")
            return False
        if worker is None:
            return False
        if row.worker is not None:
            row.worker.post(Leave(row.key, row.slot))
            row.worker.slots.discard(row.slot)
        row.key, row.worker, row.num_new, row.is_stale = next(self._keys), worker, 0, False
        self.memory.keys[row.slot] = row.key
        worker.slots.add(row.slot)
        worker.post(Follow(row.key, row.slot, row.grammar.number, tuple(row.output)))
        return True

    def _go_on(self) -> None:
        """Go on with rows whose last request is answered: ask about them, or free their slots."""
        self._post([row for row in tuple(self._due.values()) if self._prepare(row)])
        for row in [each for each in self._closed if self._asked[each.slot] == self._answered[each.slot]]:
            self._closed.remove(row)
            del self._rows[row.slot]
            self._failed.discard(row.slot)
            heapq.heappush(self._free, row.slot)
            if row.worker is not None:
                row.worker.slots.discard(row.slot)

    def _take_events(self) -> bool:
        """Take in what workers tell, and how they end; true if there was anything."""
        events, has_events = self._pool.poll()
        for worker, event in events:
            if isinstance(event, WorkerDiedError):
                self._recover(worker, event)
            elif isinstance(event, Stuck):
                for row in self._rows_of(worker):
                    if row.key == event.key:
                        self.fail(row, event.reason, "request")
            elif isinstance(event, Heavy):
                for row in self._rows_of(worker):
                    if row.grammar.number == event.grammar and not worker.owner:
                        row.grammar.is_alone = row.is_stale = True
            elif isinstance(event, Refused):
                self._refuse(worker, event)
        return has_events

    def _rows_of(self, worker: Worker) -> list[GrammarRow]:
        return [row for slot in sorted(worker.slots) if (row := self._rows[slot]).worker is worker]

    def _take_reason(self, row: GrammarRow) -> None:
        self._take_events()
        if row.error is None and row.slot not in self._due:
            self.fail(row, "its process has ended", "engine")

    def _refuse(self, worker: Worker, event: Refused) -> None:
        """A grammar was compiled before, and now it can't be."""
        for row in self._rows_of(worker):
            if row.grammar.number == event.grammar:
                reason = f"it can't be compiled again: {event.reason}"
                row.grammar.refusal = reason, "request"
                self.fail(row, reason, "request")
                self._detach(row)

    def _detach(self, row: GrammarRow) -> None:
        if row.worker is not None:
            row.worker.slots.discard(row.slot)
        row.worker, row.is_stale = None, True
        self._answered[row.slot] = self._asked[row.slot]

    def _recover(self, worker: Worker, death: WorkerDiedError) -> None:
        """A worker has ended: follow its rows anew, but for one that has ended its worker again."""
        rows = self._rows_of(worker)
        unanswered = [row for row in rows if self.wanted[row.slot] and not self._is_answered(row)]
        if not worker.is_dismissed:
            _LOG.warning("a process of grammars %s; its rows start again with another one", death)
            self._blame(worker, rows, death)
        for row in rows:
            self._detach(row)
        for row in unanswered:
            row.num_waits = row.num_waits + 1 if row.waited_at == len(row.output) else 1
            row.waited_at = len(row.output)
            if row.num_waits > _MOST_WAITS and row.error is None:
                self.fail(row, f"the last of {row.num_waits} processes {death}", "engine")
        self._post([row for row in unanswered if row.slot not in self._due and self._prepare(row)])

    def _blame(self, worker: Worker, rows: Sequence[GrammarRow], death: WorkerDiedError) -> None:
        """Find what a worker has ended at: that grammar is alone from now on, and has an error if it was before."""
        working = int(self.memory.working[worker.place])
        row = next((row for row in rows if row.key == working), None)
        grammar = row.grammar if row is not None else self._pool.grammars.get(-working)
        if grammar is None or not death.is_own:
            return
        grammar.is_alone = True
        grammar.num_late += death.out_of_time and bool(worker.owner)
        if row is None:
            grammar.num_failed_loads += 1
            if grammar.num_failed_loads > 1:
                self._give_up(grammar, f"compiling it {death}", death.cause)
            return
        is_again = row.died_at == len(row.output)
        cause = death.cause if not is_again or row.died_of == "request" else "engine"
        row.died_at, row.died_of = len(row.output), cause
        if not is_again and not grammar.is_condemned:
            return
        grammar.is_condemned = True
        reason = f"following it {death}"
        self.fail(row, reason, cause)
        self._condemn(grammar, reason, cause)
        if grammar.num_late >= _MOST_LATE:
            self._give_up(grammar, reason, cause)

    def _give_up(self, grammar: KnownGrammar, reason: str, cause: ErrorCause) -> None:
        grammar.refusal = reason, cause
        self._condemn(grammar, reason, cause)
        for row in self._rows.values():
            if row.grammar is grammar and self.wanted[row.slot]:
                self.fail(row, reason, cause)


# `PrefetchedMasks`: the masks of rows that need no request, as what may follow is known already.


class PrefetchedMasks:
    """Rows whose next token is certain, and rows in a known state of their grammar.

    What a worker has written is only looked up within the bounds of the memory: a wrong state can spoil its
    own rows alone. Rows are looked at one by one: an operation of numpy costs more than a few of them.
    """

    def __init__(self, memory: MaskMemory) -> None:
        self._memory = memory
        self._mask_indices, self._after = memory.mask_indices.data, memory.after.data

    def begin(self, row: GrammarRow, others: Iterable[GrammarRow]) -> None:
        """Take a row without output to the first state of its grammar, if other rows of it are in known states."""
        line = next((other.line for other in others if other.line != NO_LINE), NO_LINE)
        if line != NO_LINE:
            self._enter(row, line - line % MOST_STATES)

    def take_in(self, row: GrammarRow, token_ids: Sequence[int]) -> None:
        """Follow a row that is in a known state, or may be as its last answer was for the first of these tokens."""
        line = self._memory.known_line(row.slot) if row.line == NO_LINE else row.line
        for token_id in token_ids:
            if line == NO_LINE:
                break
            state = self._after[line, token_id]
            line = line - line % MOST_STATES + state if 0 <= state < MOST_STATES else NO_LINE
        if line != row.line:
            self._enter(row, line)

    def write_certain(self, row: GrammarRow) -> bool:
        """Write the mask of a row with new tokens if its next one is certain, and those new ones were."""
        following = self._memory.certain_after(row.slot, row.num_new)
        if following < 0:
            return False
        mask = self._memory.masks[row.slot]
        mask[:] = 0  # a row may have been in a known state before
        mask[following >> 5] = 1 << (following & 31)
        return True

    def certain_ids(self, row: GrammarRow, most: int) -> tuple[int, ...]:
        """The tokens, `most` at the most, that are certain to come next."""
        places = range(row.num_new, row.num_new + most)
        found = (self._memory.forced_token(row.slot, place) for place in places)
        return tuple(itertools.takewhile(lambda token_id: token_id >= 0, found))

    def _enter(self, row: GrammarRow, line: int) -> None:
        row.line = line
        self._mask_indices[row.slot] = row.slot if line == NO_LINE else self._memory.num_slots + line
