"""`Scheduler`: continuous batching, one step at a time.

A step has a budget of tokens. Each running sequence that decodes takes one and its drafts; chunks of running prompts
and prompts of waiting sequences follow, in turn by client (`turns.py`). Each prompt takes half of the remaining budget,
and tokens that remain go to the prompts that end soonest, so that a short one does not wait until a long one is read.
A sequence starts from the cached blocks of its prompt and waits when no block is free. Under pressure the running
sequence that comes last is preempted and recomputed later. A step may be scheduled before the one before it is done:
tokens that are not known yet are FROM_PREVIOUS_STEP, and results of a sequence that has ended meanwhile are dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator

import numpy as np
from numpy.typing import NDArray

from realizar.batch import ScheduledBatch, ScheduledRow, StepOutput, StepRows
from realizar.errors import QueueFullError
from realizar.kv_cache.manager import KVCacheManager
from realizar.outputs import PromptProgress, RowError, TokenOutput
from realizar.request import Request
from realizar.scheduler.admission import check_request, waits_for_blocks
from realizar.scheduler.counts import EndTimes, SchedulerCounts
from realizar.scheduler.drafted import advance_decodes
from realizar.scheduler.drafting import Drafting
from realizar.scheduler.holding import Holding
from realizar.scheduler.intake import Intake
from realizar.scheduler.open_sequences import OpenSequences
from realizar.scheduler.pace import Pace
from realizar.scheduler.plan import Plan
from realizar.scheduler.policy import Policy
from realizar.scheduler.results import failed_output
from realizar.scheduler.row_table import RowTable
from realizar.scheduler.rows import RowPool
from realizar.scheduler.sequence import Sequence
from realizar.scheduler.state_copies import StateCopies
from realizar.scheduler.steady import schedule_decodes
from realizar.scheduler.step_limit import StepLimit


class Scheduler:
    """Owns waiting and running sequences and the rows they run in.

    Args:
        cache: owner of the KV blocks, used by this scheduler alone.
        max_running: sequences in one step.
        max_step_tokens: tokens in one step.
        context_length: tokens of a request, prompt and output.
        max_queued: requests that may wait for their first step beyond those that a free row takes; None is no limit.
        pace: bounds what is read beside decodes; None reads what fits.
        drafting: has drafts proposed once a step's results are taken in; None drafts nothing.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        *,
        max_running: int,
        max_step_tokens: int,
        context_length: int,
        max_queued: int | None = None,
        policy: Policy | None = None,
        pace: Pace | None = None,
        drafting: Drafting | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._limit = StepLimit(max_running, max_step_tokens)
        self._context_length = context_length
        self._max_queued = max_queued
        self._policy = policy or Policy()
        self._pace = pace
        self._clock = clock
        self._rows = RowPool(max_running)
        self._table = RowTable(max_running, context_length, has_state=cache.has_state)
        self._open = OpenSequences(cache.block_size, self._table)
        self._end_times = EndTimes()
        self._drafting = drafting or Drafting(None, 0, 0)
        self._intake = Intake(self._open, self._table, cache, self._drafting, self._end, self.fail)
        self._holding = Holding(self._open, self._table)
        self._copies = StateCopies(cache, self._open, context_length, max_step_tokens, pace)
        self._preemptions = self._queries = self._hits = 0

    @property
    def has_work(self) -> bool:
        """True while any sequence is open."""
        return len(self._open) > 0

    @property
    def max_request_tokens(self) -> int:
        """Tokens of the longest request that can run: the context, or what the KV cache holds if that is less."""
        return min(self._context_length, self._cache.max_tokens)

    @property
    def counts(self) -> SchedulerCounts:
        return SchedulerCounts(
            running=len(self._open.running),
            waiting=len(self._open.waiting),
            preemptions=self._preemptions,
            prefix_cache_queries=self._queries,
            prefix_cache_hits=self._hits,
            draft_tokens=self._drafting.num_drafts,
            accepted_tokens=self._drafting.num_accepted,
        )

    def awaits(self, batch: ScheduledBatch) -> bool:
        """True if a submitted step must be done before the next is scheduled.

        Each step is awaited after one that did not fit into memory, to know which one fails, and a step after whose
        choices drafts may follow.
        """
        return self._limit.is_short or self._drafting.awaits(self._sequences(batch))

    def add(self, request: Request) -> None:
        """Queue a request, each choice as a sequence of its own.

        Raises:
            InvalidRequestError: an empty prompt, an id in use, or a pooled request that is to generate.
            ContextLengthError: prompt and output exceed the context.
            CapacityError: the KV cache could not hold it even alone.
            QueueFullError: the queue is full.
        """
        check_request(request, self._open.requests, self._context_length, self._cache)
        self._check_queue()
        self._open.add(request)

    def is_open(self, request_id: str) -> bool:
        """True while a request waits or runs."""
        return request_id in self._open.requests

    def prompt_progress(self, request_id: str) -> PromptProgress | None:
        """Progress of reading an open request's prompt; None if it is not open."""
        return self._open.prompt_progress(request_id)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it, without an output; its blocks are free at once. Unknown ids pass."""
        for sequence in list(self._open.requests.get(request_id, {}).values()):
            if choice is None or sequence.choice == choice:
                self._remove(sequence)

    def fail(self, sequence_id: int, error: RowError) -> TokenOutput | None:
        """End a whole request because one of its sequences failed. Returns its last output, None if it is not open."""
        sequence = self._open.get(sequence_id)
        if sequence is None:
            return None
        self.abort(sequence.request.request_id)
        return failed_output(sequence, error, self._clock())

    @property
    def holding(self) -> Holding:
        """Holds rows of a submitted step that can't choose in time."""
        return self._holding

    def lose(self, steps: Collection[ScheduledBatch], error: RowError) -> list[TokenOutput]:
        """End the requests of all steps in flight, which gave nothing; no cached block is found any more."""
        failed = [self.fail(number, error) for step in steps for number in step.columns.sequence_ids.tolist()]
        self._forget(steps)
        return [output for output in failed if output is not None]

    def try_smaller(self, steps: Collection[ScheduledBatch], error: RowError) -> list[TokenOutput]:
        """Replace all steps in flight, one of which did not fit into memory, by smaller ones.

        Their sequences start again, each in a new row, since the backend's state of the old one is not certain. A
        sequence that was alone in a step which can't be smaller ends with the error.
        """
        largest = max(steps, key=lambda step: step.num_tokens, default=None)
        if largest is None or not self._limit.failed(len(steps), largest.num_rows, largest.num_tokens):
            return self.lose(steps, error)
        for row in [row for step in steps for row in step.rows]:
            sequence = self._open.get(row.sequence_id)
            if sequence is not None:
                sequence.give_up(row)
                self._restart(sequence)
        self._forget(steps)
        return []

    def take_closed_rows(self) -> list[int]:
        """Return the rows to close in the backend: they have ended, and no submitted step names them any more."""
        return self._rows.take_closed()

    def schedule(self) -> ScheduledBatch:
        """Decide the next step, to be submitted; without rows when nothing can run before a submitted step is done."""
        plan = Plan(self._limit.tokens, self._pace, self._limit.rows)
        running = self._open.running_rows
        remaining = self._table.num_remaining(running)  # 0 where a row's last token is on its way
        decoding, prefilling = running, list[Sequence]()  # the very array, by which a backend knows the rows again
        if np.count_nonzero(remaining == 1) < len(running):
            decoding, prefilling = running[remaining == 1], self._open.of_rows(running[remaining > 1])
        if self._policy.first == "prefill":
            self._schedule_prompts(prefilling, plan)
            self._admit(plan)
            self._fill_up(plan)
            if not plan.num_rows:
                self._schedule_decodes(decoding, plan)
        else:
            self._schedule_decodes(decoding, plan)
            plan.start_prompts(max((sequence.num_computed_tokens for sequence in prefilling), default=0))
            self._schedule_prompts(prefilling, plan)
            self._admit(plan)
            self._fill_up(plan)
        columns = self._columns(plan)
        self._rows.submitted(columns.numbers)
        if len(columns) and self._pace is not None:
            self._pace.submitted(self._clock())
        return ScheduledBatch(columns, tuple(plan.opened), self._copies.of_step(plan))

    def _forget(self, steps: Collection[ScheduledBatch]) -> None:
        """Steps in flight gave nothing: blocks and snapshots of theirs are not to be found."""
        for step in steps:
            self._finished(step)
        self._cache.forget()
        if self._pace is not None:
            self._pace.lost()

    def _finished(self, step: ScheduledBatch) -> None:
        self._rows.finished(step.columns.numbers)
        self._cache.finish_moves(step.state_moves)

    def _columns(self, plan: Plan) -> StepRows:
        """The planned rows; from now on their tokens count as computed."""
        decodes, sequences = advance_decodes(plan, self._table, self._cache)
        if not sequences:
            return decodes
        others = StepRows.of([self._advance(sequence, plan) for sequence in sequences])
        return decodes.followed_by(others) if len(decodes) else others

    def update(self, batch: ScheduledBatch, output: StepOutput) -> list[TokenOutput]:
        """Take in a step's results, in the order of the batch's rows, then have drafts proposed for its sequences."""
        now = self._clock()
        self._limit.fitted()
        if self._pace is not None:
            decodes = batch.num_decode_tokens
            self._pace.ended(decodes, batch.num_tokens - decodes, now, batch.prompt_position)
        outputs = self._intake.take_in(batch.columns, output, now)
        self._finished(batch)
        if self._drafting.is_on:
            going = batch.columns.numbers[self._table.go_on(batch.columns)]
            self._drafting.propose([sequence for sequence in self._open.of_rows(going) if sequence.running])
        return outputs

    def audit(self) -> None:
        """Prove that rows and sequences belong together.

        Raises:
            RuntimeError: they don't.
        """
        self._rows.audit(self._open.audit())

    def _check_queue(self) -> None:
        if self._max_queued is None:
            return
        queued, limit = self._open.num_queued_requests, self._max_queued + self._rows.num_free
        if queued >= limit:
            retry_after_s = self._end_times.next_in_s(self._clock())
            raise QueueFullError(f"the queue is full ({queued} waiting, limit {limit}); try again later", retry_after_s)

    def _schedule_decodes(self, rows: NDArray[np.intp], plan: Plan) -> None:
        if schedule_decodes(rows, plan, self._table, self._cache):
            return
        sequences = self._open.of_rows(rows)
        rooms = self._cache.num_steady(rows, self._table.num_computed[rows]).tolist()
        for index, (sequence, room) in enumerate(zip(sequences, rooms, strict=True)):
            if plan.is_full:
                break
            if sequence.running:  # else preempted a moment ago
                drafts = sequence.drafts
                if drafts:  # every later decode has a token, too
                    drafts = drafts[: max(plan.budget - (len(sequences) - index), 0)]
                if len(drafts) < room:
                    plan.add(sequence, 1 + len(drafts), drafts)
                else:
                    self._take_blocks(sequence, sequence.own_row, plan, 1 + len(drafts), drafts)

    def _schedule_prompts(self, sequences: list[Sequence], plan: Plan) -> None:
        for sequence in sequences:
            if plan.is_full:
                break
            if sequence.running:
                self._take_blocks(sequence, sequence.own_row, plan, plan.most_of(sequence))

    def _take_blocks(
        self, sequence: Sequence, row: int, plan: Plan, wanted: int, drafts: tuple[int, ...] = ()
    ) -> None:  # fmt: skip
        """Schedule as many of the wanted tokens as blocks allow, preempting later sequences until one token fits."""
        while sequence.running:
            count = self._cache.allocate(row, sequence.num_computed_tokens, wanted)
            if count:
                count = min(count, wanted)
                plan.add(sequence, count, drafts[: count - 1])
                return
            victim = self._open.running[-1]
            plan.remove(victim)
            self._preempt(victim)

    def _admit(self, plan: Plan) -> None:
        """Start waiting sequences, in their order, while rows, blocks and budget last.

        No sequence overtakes one that waits for blocks. A sequence that waits for a row is overtaken by preempted ones:
        they keep their rows, and may hold what it waits for. A sequence whose next block is being computed by another
        one waits for that block.
        """
        for sequence in list(self._open.waiting):
            if plan.is_full or sequence.num_pending or not (self._rows.num_free or self._open.preempted):
                return
            if sequence.row is None and not self._rows.num_free:
                continue
            prefix = self._cache.find_prefix(sequence.keys, sequence.token_ids, sequence.most_cached_tokens)
            if waits_for_blocks(sequence, prefix, self._open, self._cache):
                continue
            if self._open.running and not self._cache.can_allocate(sequence.num_tokens, prefix):
                return  # alone, it always fits
            plan.go_farther(prefix.num_tokens)
            row = self._row_for(sequence, prefix.num_tokens, plan)
            self._cache.adopt(row, prefix)
            sequence.num_computed_tokens = prefix.num_tokens
            self._open.start(sequence)
            self._copies.start(sequence, prefix, plan)
            self._take_blocks(sequence, row, plan, plan.most_of(sequence))

    def _fill_up(self, plan: Plan) -> None:
        """Give the remaining budget to the step's prompts, the shortest rest first, as far as free blocks go."""
        rests = {each: each.num_chunk_tokens - count for each, count in plan.tokens.items()} if plan.budget else {}
        for sequence in sorted(rests, key=rests.__getitem__):
            wanted = plan.tokens[sequence] + min(rests[sequence], plan.budget)
            if wanted > plan.tokens[sequence]:
                allocated = self._cache.allocate(sequence.own_row, sequence.num_computed_tokens, wanted)
                plan.add(sequence, min(allocated, wanted))

    def _row_for(self, sequence: Sequence, num_cached_tokens: int, plan: Plan) -> int:
        """The sequence's row; a new one is to be opened with the step."""
        if sequence.row is None:
            self._open.give_row(sequence, self._rows.take())
            if sequence.scheduled_s is None:
                sequence.scheduled_s = self._clock()
                sequence.num_cached_tokens = num_cached_tokens
                self._queries += sequence.num_prompt_tokens
                self._hits += num_cached_tokens
            plan.opened.append(sequence.opened(sequence.own_row))
        return sequence.own_row

    def _advance(self, sequence: Sequence, plan: Plan) -> ScheduledRow:
        """The sequence's part of the batch; from now on its tokens count as computed."""
        count, drafts = plan.tokens[sequence], plan.drafts.get(sequence, ())
        request, row, computed = sequence.request, sequence.own_row, sequence.num_computed_tokens
        own = count - len(drafts)
        last = own == sequence.num_remaining_tokens
        sample = last and request.max_tokens > 0
        scheduled = ScheduledRow(
            sequence_id=sequence.sequence_id,
            row=row,
            token_ids=sequence.next_tokens(own) + drafts,
            num_computed_tokens=computed,
            sample=sample,
            logprob_queries=sequence.take_queries(count),
            num_drafts=len(drafts),
            pooling=request.pooling if last or request.pooling == "mean" else None,
            num_uncertain=len(drafts) + (self._table.may_repeat.item(row) if sample else 0),
        )
        sequence.num_computed_tokens = computed + count
        sequence.num_pending += sample
        if drafts or sequence.drafts:
            sequence.drafts, sequence.num_drafts = (), len(drafts)
        if count > 1 or not sample:  # else when the choice after the token is known
            self._cache.register(row, sequence.keys, sequence.token_ids, computed + count)
        return scheduled

    def _preempt(self, sequence: Sequence) -> None:
        self._cache.free(sequence.own_row)
        sequence.num_computed_tokens, sequence.drafts = 0, ()
        self._open.stop(sequence)
        self._preemptions += 1

    def _restart(self, sequence: Sequence) -> None:
        """A sequence waits again as if it had not run, but for what it has put out."""
        if sequence.running:
            self._preempt(sequence)
        if sequence.row is not None:
            self._rows.release(sequence.row)
            self._open.take_row(sequence)

    def _end(self, sequence: Sequence, now_s: float) -> None:
        """End a sequence that has all its tokens."""
        self._remove(sequence)
        self._end_times.note(now_s)

    def _remove(self, sequence: Sequence) -> None:
        if sequence.row is not None:
            self._cache.free(sequence.row)
            self._rows.release(sequence.row)
        self._drafting.forget(sequence)
        self._open.remove(sequence)

    def _sequences(self, batch: ScheduledBatch) -> Iterator[Sequence]:
        """Those of the batch's sequences that have not ended."""
        for number in batch.columns.sequence_ids.tolist():
            if (found := self._open.get(number)) is not None:
                yield found
