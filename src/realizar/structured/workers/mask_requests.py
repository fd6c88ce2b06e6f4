"""`MaskRequests` asks workers for masks of rows and takes them in, without waiting for any one of them."""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from realizar.errors import RequestFailedError
from realizar.outputs import ErrorCause
from realizar.structured.regex_masks import MOST_STATES
from realizar.structured.workers.followed_rows import FollowedGrammar, FollowedRow
from realizar.structured.workers.mask_memory import GOES_ON, MOST_TOKENS, STUCK, MaskMemory, fence
from realizar.structured.workers.messages import Follow, Heavy, Leave, Refused, Stuck
from realizar.structured.workers.worker import ServerError, Worker, WorkerDiedError
from realizar.structured.workers.worker_pool import WorkerPool

_LOG = logging.getLogger(__name__)
_NAP_S, _LONGEST_NAP_S = 2e-5, 1e-3
_MOST_LATE = 2  # workers of its own that a grammar may hold up, before all its rows are given up
_MOST_WAITS = 8  # workers that may end one after the other before a row has its masks, whatever ends them

Slots = NDArray[np.intp]


class MaskRequests:
    """The rows that follow grammars, and what is asked of each, in columns by slot. Not thread-safe.

    A step's requests are a few writes to the shared memory, its answers two numbers to compare. What is known
    beforehand costs no request (`PrefetchedMasks`): where the grammar allows one token its worker goes ahead of what is
    sampled, and of small expressions it knows all states.

    When a worker ends, all its rows are followed anew in others. What it worked on says which grammar may have ended
    it: that one gets a worker of its own, and a row that ends this one too, at the same token, is in error; then
    `condemn` is called. A worker that does not get on in time is ended, and then it is the same.
    """

    def __init__(
        self, memory: MaskMemory, pool: WorkerPool, condemn: Callable[[FollowedGrammar, str, ErrorCause], None]
    ) -> None:
        self.memory, self._pool, self._condemn = memory, pool, condemn
        count = memory.num_slots
        self._keys = itertools.count(1)
        self._free = list(range(count))
        self._rows: list[FollowedRow | None] = [None] * count
        self._outputs: list[list[int]] = [[] for _ in range(count)]
        self._prefetched = PrefetchedMasks(memory)
        self.wanted = np.zeros(count, np.bool_)
        self._failed = np.zeros(count, np.bool_)  # rows with an error
        # Single cells of arrays take several times as long, and operations of numpy more than some rows by themselves.
        self._asked, self._answered, self._states = memory.asked.data, memory.answered.data, memory.states.data
        self._tokens, self._num_tokens, self._num_drafts = (
            memory.tokens.data, memory.num_tokens.data, memory.num_drafts.data
        )  # fmt: skip
        self._unasked = bytearray(count)  # rows whose request is not there yet
        self._need_care = bytearray(count)  # rows whose worker may have to change
        self._stale = bytearray(count)  # rows whose worker lacks tokens
        self._num_new = [0] * count  # tokens since the last request
        self._seen = b""  # of `memory.answered`
        self._later: list[FollowedRow] = []  # rows that are asked about once their last request is answered, or placed
        self._closed: list[FollowedRow] = []  # rows that are closed, and whose slots are still in use

    def open(self, grammar: FollowedGrammar, output: Sequence[int]) -> FollowedRow:
        """A row that follows a grammar after some output. Raises RequestFailedError."""
        if not self._free:
            raise RequestFailedError(f"{self.memory.num_slots} rows follow grammars, or did a moment ago")
        slot = heapq.heappop(self._free)
        self._rows[slot] = row = FollowedRow(slot, grammar, list(output))
        self._outputs[slot] = row.output
        self.wanted[slot] = self._failed[slot] = False
        self._unasked[slot] = self._stale[slot] = self._num_new[slot] = 0
        self._prefetched.forget(slot)
        self._need_care[slot], self.memory.states[slot] = 1, GOES_ON
        if not output:  # it may be where others have been
            others = [each.slot for each in self._rows if each is not None and each.grammar is grammar]
            self._prefetched.begin(slot, others)
        return row

    def close(self, row: FollowedRow) -> None:
        """End a row. Its slot is free once nobody writes to it."""
        row.closed = True
        self.wanted[row.slot] = False
        if row.worker is not None:
            row.worker.post(Leave(row.key, row.slot))
        self._closed.append(row)
        self._go_on()

    def fail(self, row: FollowedRow, reason: str, cause: ErrorCause) -> None:
        row.error, row.cause = reason, cause
        self._failed[row.slot], self._unasked[row.slot] = True, 0

    def ask(self, slots: Slots, drafts: Mapping[int, tuple[int, ...]]) -> None:
        """Ask for masks of rows, and of some rows' drafts, by slot; returns at once. See `are_done`."""
        self.wanted[slots] = True
        prefetched, asked, answered = self._prefetched, self._asked, self._answered
        together, alone = list[int](), list[int]()
        for slot in slots.tolist():
            if prefetched.is_known(slot):
                continue
            if self._need_care[slot] or self._failed[slot] or asked[slot] != answered[slot] or slot in drafts:
                alone.append(slot)
            elif not prefetched.write_certain(slot, self._num_new[slot]):
                self._num_drafts[slot] = 0
                together.append(slot)
        for slot in together:
            self._name_tokens(slot)
        for slot in alone:
            row = self._row(slot)
            row.drafts = drafts.get(slot, ())
            if self._prepare(row):
                together.append(slot)
        self._post(together)

    def are_done(self, slots: Slots) -> NDArray[np.bool_]:
        """bool [rows], rows whose masks are there, or that have an error."""
        those, is_known = slots.tolist(), self._prefetched.is_known
        done = [self._is_answered(slot) for slot in those]
        fence()
        for at, slot in enumerate(those):
            if done[at] and self._states[slot] == STUCK and not self._failed[slot]:
                self._learn(self._row(slot))
            done[at] = done[at] or is_known(slot)
        return np.array(done, np.bool_) | self._failed[slots]

    def are_failed(self, slots: Slots) -> NDArray[np.bool_]:
        return self._failed[slots]

    def certain_ids(self, slot: int, most: int) -> tuple[int, ...]:
        """The next tokens of a row that its grammar forces, `most` at the most, as far as they were found."""
        if not self._is_answered(slot) or self._stale[slot] or self._failed[slot]:
            return ()
        return self._prefetched.certain_ids(slot, self._num_new[slot], most)

    def advance(self, slots: Slots, sampled: NDArray[np.int32], counts: NDArray[np.intp]) -> None:
        """Take in the sampled tokens of rows, int32 [rows, most], so many of each; earlier masks are used up."""
        self.wanted[slots] = False
        for slot, token_ids, count in zip(slots.tolist(), sampled.tolist(), counts.tolist(), strict=True):
            self._outputs[slot] += token_ids[:count]
            new = self._num_new[slot]
            is_first = not new and self._is_answered(slot)
            for token_id in token_ids[:count]:
                self._prefetched.take_in(slot, token_id, is_first=is_first)
                is_first = False
            self._num_new[slot] = new = new + count
            if new > MOST_TOKENS or self._unasked[slot]:
                self._stale[slot] = self._need_care[slot] = 1

    def wait(self, timeout_s: float) -> None:
        """Take in what there is; where nothing has come, wait for the first masks or news, `timeout_s` at most."""
        end_s, nap_s = time.monotonic() + timeout_s, _NAP_S
        while True:
            has_news = self._take_news()
            self._go_on()
            if has_news or self.memory.answered.tobytes() != self._seen:
                self._seen = self.memory.answered.tobytes()
                return
            if (now_s := time.monotonic()) >= end_s:
                return
            time.sleep(min(nap_s, end_s - now_s))
            nap_s = min(1.5 * nap_s, _LONGEST_NAP_S)

    def _row(self, slot: int) -> FollowedRow:
        row = self._rows[slot]
        assert row is not None
        return row

    def _is_answered(self, slot: int) -> bool:
        return self._asked[slot] == self._answered[slot] and not self._unasked[slot]

    def _name_tokens(self, slot: int) -> None:
        self._num_tokens[slot] = new = self._num_new[slot]
        for place, token_id in enumerate(self._outputs[slot][-new:] if new else ()):
            self._tokens[slot, place] = token_id
        self._num_new[slot] = 0

    def _post(self, slots: Sequence[int]) -> None:
        """Let what was written be the next request of rows, and wake their workers."""
        if not slots:
            return
        fence()
        for slot in slots:
            self._asked[slot] += 1
        fence()
        self._pool.wake({worker for slot in slots if (worker := self._row(slot).worker) is not None})

    def _prepare(self, row: FollowedRow) -> bool:
        """Write one row's request, with its drafts; false if that is to be done later, or it has ended or failed."""
        slot = row.slot
        self._unasked[slot] = not (row.closed or self._failed[slot])
        if not self._unasked[slot]:
            return False
        if (refusal := row.grammar.refusal) is not None:
            self.fail(row, *refusal)
            return False
        worker = self._placed(row) if self._asked[slot] == self._answered[slot] else None
        if worker is None:
            if row not in self._later and not self._failed[slot]:
                self._later.append(row)
            return False
        if row.worker is not worker or self._stale[slot]:
            self._follow(row, worker)
        else:
            self._name_tokens(slot)
        self._need_care[slot] = self._unasked[slot] = 0
        self._num_drafts[slot] = count = len(row.drafts)
        self.memory.drafts[slot, :count] = row.drafts
        return True

    def _placed(self, row: FollowedRow) -> Worker | None:
        """The worker that follows a row from now on; None if there is none yet, or it fails."""
        if row.worker is not None and row.worker.is_doomed:
            return None
        try:
            return self._pool.place(row)
        except ServerError as error:
            self.fail(row, f"it can't be compiled again: {error}", "engine")
            return None

    def _follow(self, row: FollowedRow, worker: Worker) -> None:
        slot = row.slot
        if row.worker is not None:
            row.worker.post(Leave(row.key, slot))
            row.worker.slots.discard(slot)
        row.key, row.worker = next(self._keys), worker
        worker.slots.add(slot)
        worker.post(Follow(row.key, slot, row.grammar.number, tuple(row.output)))
        self.memory.keys[slot], self._num_tokens[slot] = row.key, 0
        self._stale[slot] = self._num_new[slot] = 0

    def _go_on(self) -> None:
        """Go on with rows whose last request is answered: ask about them, or free their slots."""
        if self._later:
            rows, self._later = self._later, []
            self._post([row.slot for row in rows if self._prepare(row)])
        for row in [each for each in self._closed if self._asked[each.slot] == self._answered[each.slot]]:
            self._closed.remove(row)
            self._rows[row.slot] = None
            heapq.heappush(self._free, row.slot)
            if row.worker is not None:
                row.worker.slots.discard(row.slot)

    def _take_news(self) -> bool:
        """Take in what workers tell, and how they end; true if there was anything."""
        events, has_news = self._pool.poll()
        for worker, event in events:
            if isinstance(event, WorkerDiedError):
                self._bury(worker, event)
            elif isinstance(event, Stuck):
                for row in self._rows_of(worker):
                    if row.key == event.key:
                        self.fail(row, event.reason, "request")
            elif isinstance(event, Heavy):
                for row in self._rows_of(worker):
                    if row.grammar.number == event.grammar and not worker.owner:
                        row.grammar.is_alone = True
                        self._need_care[row.slot] = 1
            elif isinstance(event, Refused):
                self._refuse(worker, event)
        return has_news

    def _rows_of(self, worker: Worker) -> list[FollowedRow]:
        return [row for slot in sorted(worker.slots) if (row := self._rows[slot]) is not None and row.worker is worker]

    def _learn(self, row: FollowedRow) -> None:
        self._take_news()
        if row.error is None and not self._unasked[row.slot]:
            self.fail(row, "its process has ended", "engine")

    def _refuse(self, worker: Worker, event: Refused) -> None:
        """A grammar was compiled before, and now it can't be."""
        for row in self._rows_of(worker):
            if row.grammar.number == event.grammar:
                reason = f"it can't be compiled again: {event.reason}"
                row.grammar.refusal = reason, "request"
                self.fail(row, reason, "request")
                self._let_go(row)

    def _let_go(self, row: FollowedRow) -> None:
        if row.worker is not None:
            row.worker.slots.discard(row.slot)
        row.worker = None
        self._answered[row.slot] = self._asked[row.slot]

    def _bury(self, worker: Worker, death: WorkerDiedError) -> None:
        """A worker has ended: follow its rows anew, but for one that has ended its worker again."""
        rows = self._rows_of(worker)
        unanswered = [row for row in rows if self.wanted[row.slot] and not self._is_answered(row.slot)]
        if not worker.is_dismissed:
            _LOG.warning("a process of grammars %s; its rows start again with another one", death)
            self._blame(worker, rows, death)
        for row in rows:
            self._let_go(row)
            self._need_care[row.slot] = 1
        for row in unanswered:
            row.num_waits = row.num_waits + 1 if row.waited_at == len(row.output) else 1
            row.waited_at = len(row.output)
            if row.num_waits > _MOST_WAITS and not self._failed[row.slot]:
                self.fail(row, f"the last of {row.num_waits} processes {death}", "engine")
        self._post([row.slot for row in unanswered if row not in self._later and self._prepare(row)])

    def _blame(self, worker: Worker, rows: Sequence[FollowedRow], death: WorkerDiedError) -> None:
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

    def _give_up(self, grammar: FollowedGrammar, reason: str, cause: ErrorCause) -> None:
        grammar.refusal = reason, cause
        self._condemn(grammar, reason, cause)
        for row in self._rows:
            if row is not None and row.grammar is grammar and self.wanted[row.slot]:
                self.fail(row, reason, cause)


# `PrefetchedMasks`: the masks of rows that need no request, as what may follow is known already.

NO_LINE = -1


class PrefetchedMasks:
    """Rows whose next token is certain, and rows in a known state of their grammar.

    What a worker has written is only looked up within the bounds of the memory: a wrong state can spoil its
    own rows alone. Rows are looked at one by one, by their slot: an operation of numpy costs more than a few of them.
    """

    def __init__(self, memory: MaskMemory) -> None:
        self._memory = memory
        self._lines = [NO_LINE] * memory.num_slots  # of the states of rows, by slot
        self._places, self._after = memory.places.data, memory.after.data
        self._num_states = len(memory.after)

    def is_known(self, slot: int) -> bool:
        """True for a row in a known state; `MaskMemory.places` says where its mask is."""
        return self._lines[slot] != NO_LINE

    def forget(self, slot: int) -> None:
        self._lines[slot], self._places[slot] = NO_LINE, slot

    def begin(self, slot: int, others: Sequence[int]) -> None:
        """Take a row without output to the first state of its grammar, if other rows of it are in known states."""
        for other in others:
            if (line := self._lines[other]) != NO_LINE:
                self._enter(slot, line - line % MOST_STATES)
                return

    def take_in(self, slot: int, token_id: int, *, is_first: bool) -> None:
        """Follow a row by one token; `is_first`: its last answer was for this token."""
        if not self._num_states:
            return
        line = self._lines[slot]
        if line == NO_LINE:
            line = self._memory.known_line(slot) if is_first else NO_LINE
            if line == NO_LINE:
                return
        state = self._after[line, token_id]
        if 0 <= state < MOST_STATES:
            self._enter(slot, line - line % MOST_STATES + state)
        else:
            self.forget(slot)

    def write_certain(self, slot: int, num_new: int) -> bool:
        """Write the mask of a row if its next token is certain, and was before; `num_new` came since the last
        answer.
        """
        if not num_new:
            return False
        before, following = (self._memory.forced_token(slot, place) for place in (num_new - 1, num_new))
        if before < 0 or following < 0:
            return False
        mask = self._memory.masks[slot]
        mask[:] = 0  # a row may have been in a known state before
        mask[following >> 5] = 1 << (following & 31)
        return True

    def certain_ids(self, slot: int, num_new: int, most: int) -> tuple[int, ...]:
        """The tokens, `most` at the most, that are certain to come next."""
        found = list[int]()
        while len(found) < most and (token_id := self._memory.forced_token(slot, num_new + len(found))) >= 0:
            found.append(token_id)
        return tuple(found)

    def _enter(self, slot: int, line: int) -> None:
        self._lines[slot], self._places[slot] = line, self._memory.num_slots + line
