"""`Scheduler`: continuous batching, one step at a time.

A step has a budget of tokens. Each running sequence that decodes takes one and its drafts; chunks of running prompts
and prompts of waiting sequences follow, in turn by client. Each prompt takes half of the remaining budget, and tokens
that remain go to the prompts that end soonest, so that a short one does not wait until a long one is read. A sequence
starts from the cached blocks of its prompt and waits when no block is free. Under pressure the running sequence that
comes last is preempted and recomputed later. A step may be scheduled before the one before it is done: tokens that are
not known yet are FROM_PREVIOUS_STEP, and results of a sequence that has ended meanwhile are dropped.

The numbers of rows lie in the columns of a `RowTable`; sequences are looked at one by one where they start, read their
prompts, fill a block or end.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from realizar.batch import NOT_SAMPLED, LogprobQuery, ScheduledBatch, StepOutput, StepRows
from realizar.errors import CapacityError, ContextLengthError, InvalidRequestError, QueueFullError
from realizar.kv_cache.block_keys import BlockKeys
from realizar.kv_cache.manager import KVCacheManager, Prefix
from realizar.logprob_columns import RowColumns
from realizar.outputs import FinishReason, PromptProgress, RowError, added_by_place
from realizar.request import Pooling, Request
from realizar.scheduler.drafts import Drafting
from realizar.scheduler.growing_deltas import GrowingDeltas
from realizar.scheduler.open_sequences import OpenSequences, ReadSteps
from realizar.scheduler.pace import Pace, Policy
from realizar.scheduler.plan import Aside, Plan, StepLimit
from realizar.scheduler.row_table import Rows, RowTable, Sequence
from realizar.scheduler.state_copies import StateCopies
from realizar.step_deltas import StepDeltas

_LOG = logging.getLogger(__name__)
_LEAST_WAIT_S, _MOST_WAIT_S = 1.0, 60.0  # that a client is told while the queue is full


@dataclass(slots=True)
class SchedulerCounts:
    """Sequences by state now, and counts since the start, all in `EngineStats`; each choice of a request is one."""

    num_running: int = 0
    num_waiting: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_place: tuple[int, ...] = ()


class Scheduler:
    """Owns waiting and running sequences and the rows they run in.

    Args:
        cache: owner of the KV blocks, used by this scheduler alone. Rows, tokens of a step, and tokens of a request are
            as many as it was made for.
        max_queued: requests that may wait for their first step beyond those that a free row takes; None is no limit.
        pace: bounds what is read beside decodes; by default what fits is read.
        drafting: has drafts proposed once a step's results are taken in; None drafts nothing.
        clock: seconds, monotonic.
        aside_tokens: of a chunk that the backend reads aside, at most, with a pace that bounds steps; 0 for none.

    Attributes:
        aside: the prompt that is read so. Callers say how many of its chunks run.
    """

    def __init__(
        self, cache: KVCacheManager, *, max_queued: int | None = None, policy: Policy | None = None,
        pace: Pace | None = None, drafting: Drafting | None = None, clock: Callable[[], float] = time.monotonic,
        aside_tokens: int = 0,
    ) -> None:  # fmt: skip
        self._cache = cache
        self._limit = StepLimit(cache.num_rows, cache.max_step_tokens)
        self._max_queued = max_queued
        self._policy = policy or Policy()
        self._pace = pace or Pace(math.inf, 1)
        self.aside = Aside(aside_tokens)
        self._clock = clock
        self._table = RowTable(cache.num_rows, cache.context_length, has_state=cache.has_state)
        self._open = OpenSequences(cache.block_size, self._table)
        self._rows = self._open.rows
        self._ended_s: deque[float] = deque(maxlen=32)  # when the last sequences ended
        self._drafting = drafting or Drafting(None, 0, 0, cache.num_rows)
        self._read_steps = ReadSteps()
        self._deltas = GrowingDeltas()
        self._copies = StateCopies(cache, self._table, self._open, self._deltas, self._pace)
        self._counts = SchedulerCounts()

    @property
    def has_work(self) -> bool:
        return len(self._open) > 0

    @property
    def max_request_tokens(self) -> int:
        """Tokens of the longest request that can run: the context, or what the KV cache holds if that is less."""
        return min(self._cache.context_length, self._cache.max_tokens)

    @property
    def prompt_token_s(self) -> float | None:
        """Seconds in which a token of a prompt is computed that is read alone; None before one was."""
        return self._pace.alone_token_s

    @property
    def counts(self) -> SchedulerCounts:
        return replace(self._counts, num_running=len(self._open.running), num_waiting=self._open.num_waiting)

    def awaits(self, batch: ScheduledBatch) -> bool:
        """True if a submitted step must be done before the next is scheduled."""
        if self._limit.is_short:
            return True  # to know which one fails
        if not self._drafting.is_on or not self._drafting.awaits_results(int(batch.columns.samples.sum())):
            return False
        rows = batch.columns.numbers[self._table.are_open(batch.columns)]
        return bool((self._table.num_remaining(rows) <= 1).any())

    def add(self, request: Request, keys: BlockKeys | None = None, num_coming: int = 0) -> None:
        """Queue a request, each choice as a sequence of its own; `keys` are those of the first. Raises as `check`."""
        self.check(request, num_coming)
        for sequence in self._open.add(request, keys):
            self._deltas.open(sequence)

    def check(self, request: Request, num_coming: int = 0) -> None:
        """Refuse what can't be queued, also where so many requests come first that are not queued yet.

        Raises:
            InvalidRequestError: an empty prompt, an id in use, or a pooled request that is to generate.
            ContextLengthError: prompt and output exceed the context. QueueFullError: the queue is full.
            CapacityError: the KV cache could not hold it even alone.
        """
        self._check_request(request)
        self._check_queue(num_coming)

    def is_open(self, request_id: str) -> bool:
        return request_id in self._open.requests

    def prompt_progress(self, request_id: str) -> PromptProgress | None:
        """Progress of the first choice of a request in reading the prompt; None if none is open."""
        first = next(iter(self._open.requests.get(request_id, {}).values()), None)
        if first is None:
            return None
        num_tokens = first.request.num_prompt_tokens
        return PromptProgress(num_tokens, first.num_cached_tokens, min(first.num_computed_tokens, num_tokens))

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it, without an output; its blocks are free at once. Unknown ids pass."""
        for sequence in list(self._open.requests.get(request_id, {}).values()):
            if choice is None or sequence.choice == choice:
                self._remove(sequence)

    def fail(self, sequence_id: int, error: RowError) -> None:
        """End a whole request because one of its sequences failed; one that is not open passes."""
        sequence = self._open.get(sequence_id)
        if sequence is None:
            return
        request_id = sequence.request.request_id
        if error.cause != "request":
            _LOG.error("request %s ended: %s", request_id, error.message)
        self._deltas.now_s = self._clock()
        self._deltas.fail(sequence, error)
        self.abort(request_id)

    def lose(self, steps: Collection[ScheduledBatch], error: RowError) -> None:
        """End the requests of all steps in flight, which gave nothing; no cached block is found any more."""
        for step in steps:
            for number in step.columns.sequence_ids.tolist():
                self.fail(number, error)
        self._forget(steps)

    def try_smaller(self, steps: Collection[ScheduledBatch], error: RowError) -> None:
        """Replace all steps in flight, one of which did not fit into memory, by smaller ones.

        Their sequences start again in new rows: the backend's state of the old ones is not certain. A sequence that was
        alone in a step which can't be smaller ends with the error: also one with an image that has to fit into one.
        """
        largest = max(steps, key=lambda step: step.num_tokens, default=None)
        if largest is None or not self._limit.failed(len(steps), largest.num_rows, largest.num_tokens):
            self.lose(steps, error)
            return
        for columns in [step.columns for step in steps]:
            for index, number in enumerate(columns.sequence_ids.tolist()):
                sequence = self._open.get(number)
                if sequence is None:
                    continue
                if largest.num_rows == 1 and sequence.request.longest_whole_run > self._limit.tokens:
                    self.fail(number, error)
                    continue
                if queries := columns.logprob_queries.get(index):  # later steps ask for them again
                    first = int(columns.num_computed_tokens[index]) + queries[0].index
                    sequence.num_queried = min(sequence.num_queried, first)
                self._restart(sequence)
        self._forget(steps)

    def defer(self, step: ScheduledBatch, rows: Collection[int]) -> None:
        """Let rows of the oldest submitted step, whose masks are late, sample nothing in it, and try again in the next.

        Such a row computes its last token once more: the same keys and values at the same place. It keeps the blocks
        that this token sees (`kv_cache/manager.py`). Without it a step would wait for its slowest grammar. Rows whose
        sequences have ended pass.
        """
        table, columns = self._table, step.columns
        deferred = columns.are_among(rows) & table.are_open(columns)
        numbers = columns.numbers[deferred]
        table.num_pending[numbers] -= 1
        table.num_drafts[numbers] = 0
        table.num_computed[numbers] -= (1 + columns.num_drafts[deferred]) * table.is_running[numbers]

    def computed_again(self, step: ScheduledBatch, rows: Collection[int]) -> ScheduledBatch:
        """A step that was scheduled before rows were deferred, in which they compute their last token again."""
        again = step.columns.are_among(rows) & self._table.is_running[step.columns.numbers]
        return replace(step, columns=self._table.computed_again(step.columns, again)) if again.any() else step

    def take_closed_rows(self) -> list[int]:
        """Return the rows to close in the backend: they have ended, and no submitted step names them any more."""
        return self._rows.take_released()

    def schedule(self) -> ScheduledBatch:
        """Decide the next step, to be submitted; without rows when nothing can run before a submitted step is done."""
        plan = Plan(self._limit.tokens, self._limit.rows)
        self._take_rows_back(plan)
        running = self._open.running_rows
        remaining = self._table.num_remaining(running)  # 0 where a row's last token is on its way
        are_decodes = (remaining == 1) & self._table.samples[running]
        decoding, prompts = running, list[Sequence]()  # the very array, by which a backend knows the rows again
        if np.count_nonzero(are_decodes) < len(running):
            decoding = running[are_decodes]
            prompts = self._open.of_rows(running[(remaining > 0) & ~are_decodes])
        equal, is_much, readers = None, False, set[str]()
        if self._is_shared:
            equal = self._open.num_equal_rows
            readers = self._open.waiting.keys() | {each.request.client.name for each in prompts}
            is_much = self._read_steps.is_much(readers, self._open.showing(prompts))
        if self._policy.first == "prefill":
            self._schedule_prompts(prompts, readers, plan)
            if not plan.num_rows:
                self._schedule_decodes(decoding, plan)
        else:
            if equal is not None:
                most_rows = self._pace.most_decodes(equal, len(decoding), leaves_room=is_much)
                plan.takes_turns = most_rows < len(decoding)
                decoding = self._open.in_turn(decoding, most_rows) if plan.takes_turns else decoding
            image = max((each.num_image_tokens for each in prompts), default=0)
            plan.budget -= image  # what an image needs at once, decodes leave
            self._schedule_decodes(decoding, plan)
            plan.budget += image
            prompts = self._without_aside(prompts, plan)
            most = partial(self._pace.prompt_tokens, plan.num_tokens, equal=equal, is_much=is_much)
            plan.start_prompts(most, max((sequence.num_computed_tokens for sequence in prompts), default=0))
            self._schedule_prompts(prompts, readers, plan)
        if self._is_shared and len(plan.decodes):
            self._read_steps.note(plan.prompts, is_much=is_much)
        columns = self._look_ahead(self._advance(plan))
        aside = self.aside.work(self._begin_aside(plan))
        self._rows.submitted(columns.numbers)
        if len(columns):
            self._pace.submitted(self._clock(), 0 if plan.prompts else plan.num_tokens)
        return ScheduledBatch(columns, tuple(plan.opened), self._copies.of_step(plan), aside)

    def _without_aside(self, prompts: list[Sequence], plan: Plan) -> list[Sequence]:
        """The prompts but the one that is read aside; without decodes there is none."""
        if not len(plan.decodes):
            self.aside.leave()
        elif not self._open.waiting and not self._limit.is_short and self._pace.lets_aside(plan.num_tokens):
            self.aside.choose(prompts)
        return [each for each in prompts if each is not self.aside.sequence]

    def _begin_aside(self, plan: Plan) -> StepRows | None:
        """The chunk that begins beside this step, if any: none while others' prompts are read."""
        if (sequence := self.aside.sequence) is None:
            return None
        others = bool(plan.prompts or self._open.waiting) or not self._pace.lets_aside(plan.num_tokens)
        if not (wanted := self.aside.wanted(others=others)):
            return None
        count = self._cache.allocate(sequence.own_row, sequence.num_computed_tokens, wanted)
        if not self.aside.begin(count):
            return None
        return self._table.advance(np.array([sequence.own_row]), np.array([count], np.int32), np.zeros(1, np.int32))

    def pause_s(self) -> float:
        """Seconds for which nothing need be scheduled: a chunk runs aside, and the streams have had their tokens."""
        if not self.aside.num_running or self.aside.sequence is None or self._open.waiting:
            return 0.0
        return self._pace.pause_s(self._clock())

    def beside_s(self, batch: ScheduledBatch, num_waiting: int, client: str) -> float:
        """As `Pace.beside_s`, after a step that was submitted last, for a client's request and so many that wait."""
        decodes = batch.num_decode_tokens
        return self._pace.beside_s(
            decodes, is_much=num_waiting > decodes, reads=batch.num_tokens > decodes,
            is_shared=not self._open.clients.keys() <= {client},
        )  # fmt: skip

    def take_deltas(self) -> StepDeltas:
        """What choices gained since the last call."""
        return self._deltas.take()

    def request_of(self, number: int) -> str | None:
        """The request of a choice, by its number in deltas, that is open or whose end was in the last ones."""
        sequence = self._open.get(number)
        return self._deltas.ended.get(number) if sequence is None else sequence.request.request_id

    def update(self, batch: ScheduledBatch, output: StepOutput) -> None:
        """Take in a step's results, then have drafts proposed for its sequences."""
        now = self._deltas.now_s = self._clock()
        self._limit.fitted()
        decodes = batch.num_decode_tokens
        self._pace.ended(decodes, batch.num_tokens - decodes, now, batch.prompt_position, batch.aside)
        self._drafting.ended(batch.columns, output.num_sampled, now, only_decodes=decodes == batch.num_tokens)
        self._update_rows(batch.columns, output)
        self._finished(batch)
        if self._drafting.is_on:
            go_on = self._table.go_on(batch.columns)
            self._drafting.propose(self._open.of_rows(batch.columns.numbers[go_on]), output.drafts, go_on)

    def audit(self) -> None:
        """Prove that rows and sequences belong together; RuntimeError says that they don't."""
        self._open.audit()

    def _check_request(self, request: Request) -> None:
        if not request.prompt_token_ids:
            raise InvalidRequestError("the prompt is empty", "prompt")
        if request.request_id in self._open.requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", "request_id")
        prompt, generated, cache = request.num_prompt_tokens, request.max_tokens, self._cache
        if request.pooling is not None and generated > 0:
            raise InvalidRequestError(f"a pooled request generates nothing, not {generated} tokens", "max_tokens")
        if prompt + generated > self._cache.context_length:
            is_long = prompt >= self._cache.context_length
            raise ContextLengthError(
                f"{'the prompt is too long: ' if is_long else ''}this model's maximum context length is "
                f"{self._cache.context_length} tokens; the prompt has {prompt} and {generated} are to be generated: "
                f"together {prompt + generated}",
                "prompt" if is_long else "max_tokens",
            )
        stored = max(prompt, prompt + generated - 1)  # the last token is never read back
        longest = request.longest_whole_run
        if longest > cache.max_step_tokens:
            raise InvalidRequestError(
                f"an image of the prompt has {longest} tokens, which are read in one step as they see each other; a "
                f"step has at most {cache.max_step_tokens} (max_step_tokens)",
                "prompt",
            )
        if stored > cache.max_tokens:
            num_blocks = "+".join(str(group.total) for group in cache.counts)
            raise CapacityError(
                f"the request needs KV cache for {stored} tokens; the {num_blocks} blocks of {cache.block_size} tokens "
                f"hold at most {cache.max_tokens}"
            )

    def _check_queue(self, num_coming: int) -> None:
        if self._max_queued is None:
            return
        queued, limit = self._open.num_queued_requests + num_coming, self._max_queued + self._rows.num_free
        if queued < limit:
            return
        wait_s = (self._clock() - self._ended_s[0]) / len(self._ended_s) if self._ended_s else _LEAST_WAIT_S
        raise QueueFullError(
            f"the queue is full ({queued} waiting, limit {limit}); try again later",
            min(max(wait_s, _LEAST_WAIT_S), _MOST_WAIT_S),
        )

    @property
    def _is_shared(self) -> bool:
        return len(self._open.clients) > 1

    def _schedule_decodes(self, rows: Rows, plan: Plan) -> None:
        """Schedule the last token of each row, and drafts after it as far as all rows have their token."""
        if len(rows) > plan.num_free:
            rows = rows[: plan.num_free]
        table, num_drafts, wanted = self._table, None, 1
        if np.count_nonzero(proposed := table.num_proposed[rows]):
            before = np.cumsum(proposed) - proposed
            num_drafts = np.minimum(np.maximum(plan.budget - len(rows) - before, 0), proposed).astype(np.int32)
            wanted = num_drafts + 1
        preemptions = self._counts.num_preemptions
        lack_blocks = self._cache.num_steady(rows, table.num_computed[rows]) < wanted
        for index in lack_blocks.nonzero()[0].tolist():
            count = self._allocate(int(rows[index]), 1 if num_drafts is None else 1 + int(num_drafts[index]), plan)
            if num_drafts is not None:
                num_drafts[index] = max(count - 1, 0)
        if self._counts.num_preemptions > preemptions:
            stay = table.is_running[rows]
            rows, num_drafts = rows[stay], None if num_drafts is None else num_drafts[stay]
        plan.add_decodes(rows, num_drafts)

    def _schedule_prompts(self, prompts: ListOf[Sequence], readers: Collection[str], plan: Plan) -> None:
        """Schedule chunks of running prompts, then waiting ones, then what remains; `readers` have shares first."""
        if not prompts and not self._open.waiting:
            return  # in nearly every step
        prompts = sorted(prompts, key=lambda each: not each.num_image_tokens)  # which may need all of the budget
        weights = {name: self._open.clients[name].weight for name in readers}
        for shares in (weights, None) if len(readers) > 1 else (None,):
            plan.share(shares)
            for sequence in prompts:
                if not plan.num_free:
                    break
                if sequence.running and sequence not in plan.prompts:
                    self._take_chunk(sequence, plan)
            self._admit(plan)
            self._fill_up(plan)

    def _take_chunk(self, sequence: Sequence, plan: Plan) -> None:
        """Schedule up to half of what there is for a prompt, so that no other waits long."""
        room = max(self._limit.tokens, sequence.num_image_tokens) - plan.num_tokens
        wanted = sequence.chunk(min(sequence.num_chunk_tokens, -(-plan.room_for(sequence) // 2)), room)
        if wanted and (count := self._allocate(sequence.own_row, wanted, plan, lambda own: sequence.chunk(own, own))):
            plan.add(sequence, count)

    def _allocate(self, row: int, wanted: int, plan: Plan, cut: Callable[[int], int] = int) -> int:
        """Own blocks for up to `wanted` next tokens of a row, as many as `cut` leaves of those that there are blocks
        for; others are preempted for the first ones, or it is: 0.
        """
        while self._table.is_running[row]:
            if count := cut(self._cache.allocate(row, self._table.num_computed.item(row), wanted)):
                return count
            victim = self._open.last_of_most() or self._open.running[-1]
            plan.remove(victim)
            self._preempt(victim)
        return 0

    def _admit(self, plan: Plan) -> None:
        """Start waiting sequences, in their order, while rows, blocks and budget last.

        No sequence overtakes one that waits for blocks. One that waits for a row is overtaken by preempted ones, which
        keep theirs. One whose next block is being computed by another waits for it. A client who has less than its
        share takes blocks back from one who has more, and who has its share starts no more while its rows take turns.
        """
        passed_over, held_back = set[str](), set[str]()  # clients, and requests whose choices wait for the first one
        for sequence in self._open.waiting_in_turn(passed_over):
            name, request_id = sequence.request.client.name, sequence.request.request_id
            if not plan.num_free or sequence.num_pending or not (self._rows.num_free or self._open.num_preempted):
                return
            if not plan.room_for(sequence) or (plan.takes_turns and self._open.has_share(name)):
                passed_over.add(name)
                continue
            if sequence.row is None and (request_id in held_back or not self._rows.num_free):
                continue
            prefix = self._cache.find_prefix(sequence.keys, sequence.token_ids, sequence.most_cached_tokens)
            if self._waits_for_blocks(sequence, prefix):
                if sequence.row is None:
                    held_back.add(request_id)
                continue
            while self._open.running and not self._cache.can_allocate(sequence.num_tokens, prefix):
                if not self._take_back(sequence, plan):
                    return  # alone, it always fits
            plan.limit(prefix.num_tokens)
            row = self._row_for(sequence, prefix.num_tokens, plan)
            self._cache.adopt(row, prefix)
            self._table.num_computed[row] = prefix.num_tokens
            self._open.start(sequence)
            self._copies.start(sequence, prefix, plan)
            self._take_chunk(sequence, plan)

    def _take_rows_back(self, plan: Plan) -> None:
        """Free rows of clients who have more than their share, for those who wait and have less."""
        if not self._is_shared or self._rows.num_free:
            return
        lacking = (each for each in self._open.waiting_in_turn() if each.row is None)
        for index, sequence in enumerate(lacking):
            if index >= self._rows.num_released and not self._take_back(sequence, plan):
                return

    def _take_back(self, sequence: Sequence, plan: Plan) -> bool:
        """Let a sequence of another client, who has more than its share, start again later. False if there is none."""
        name = sequence.request.client.name
        if not self._is_shared or self._open.has_share(name):
            return False
        share = self._open.share(name) / self._cache.num_rows
        victim = self._open.last_of_most(loses_nothing=True)
        if victim is None or sequence.num_tokens > max(share * self._cache.max_tokens, 1):
            return False
        plan.remove(victim)
        self._restart(victim)
        return True

    def _waits_for_blocks(self, sequence: Sequence, prefix: Prefix) -> bool:
        """True if a running sequence is about to compute the block after this sequence's cached prefix.

        So a prefix that choices or requests share is computed once. Where the model has a state, the block has to be
        followed by others up to one after which a snapshot is to be taken.
        """
        cache, size, found, most = self._cache, self._cache.block_size, prefix.num_tokens, sequence.most_cached_tokens
        if not cache.prefix_cache or found + size > most:
            return False
        own = sequence.keys.of(sequence.token_ids)
        if cache.has_state:
            ends = [
                (other, at) for other in self._open.running for at in other.snapshot_positions if found < at <= most
            ]
        else:
            rows, end = self._open.running_rows, found + size
            about_to = (self._table.num_computed[rows] < end) & (end <= self._table.num_known[rows])
            ends = [(other, end) for other in self._open.of_rows(rows[about_to])]
        indices = [(other, end // size - 1) for other, end in ends if cache.lets_find(other.own_row)]
        return any(other.keys.of(other.token_ids)[index] == own[index] for other, index in indices)

    def _fill_up(self, plan: Plan) -> None:
        """Give the remaining budget to the step's prompts, the shortest rest first, as far as free blocks go."""
        rests = {each: each.num_chunk_tokens - count for each, count in plan.prompts.items()} if plan.budget else {}
        for sequence in sorted(rests, key=rests.__getitem__):
            before = plan.prompts[sequence]
            wanted = sequence.chunk(before + min(rests[sequence], plan.room_for(sequence)), before)
            if wanted > before:
                count = self._cache.allocate(sequence.own_row, sequence.num_computed_tokens, wanted)
                plan.add(sequence, max(sequence.chunk(count, count), before))

    def _row_for(self, sequence: Sequence, num_cached_tokens: int, plan: Plan) -> int:
        if sequence.row is None:
            self._open.give_row(sequence)
            if sequence.scheduled_s is None:
                sequence.scheduled_s = self._clock()
                sequence.num_cached_tokens = num_cached_tokens
                self._counts.prefix_cache_queries += sequence.request.num_prompt_tokens
                self._counts.prefix_cache_hits += num_cached_tokens
            plan.opened.append(sequence.opened())
            self._drafting.begin(sequence)
        return sequence.own_row

    def _advance(self, plan: Plan) -> StepRows:
        table, cache = self._table, self._cache
        if not plan.prompts and plan.num_drafts is None:
            return table.advance(plan.decodes)
        drafts = np.zeros(len(plan.decodes), np.int32) if plan.num_drafts is None else plan.num_drafts
        rows = np.concatenate((plan.decodes, np.array([each.own_row for each in plan.prompts], np.intp)))
        counts = np.concatenate((1 + drafts, np.array(list(plan.prompts.values()), np.int32)))
        queries: dict[int, tuple[LogprobQuery, ...]] = {}
        pooling: dict[int, Pooling] = {}
        for index, (sequence, count) in enumerate(plan.prompts.items(), start=len(plan.decodes)):
            if found := sequence.take_queries(count):
                queries[index] = found
            wanted = sequence.request.pooling
            is_last = sequence.num_computed_tokens + count == sequence.request.num_prompt_tokens
            if wanted is not None and (wanted == "mean" or is_last):
                pooling[index] = wanted
        columns = table.advance(rows, counts, np.concatenate((drafts, np.zeros(len(plan.prompts), np.int32))))
        if cache.prefix_cache:  # a row of one token is looked at when the one sampled after it is known
            are_new = cache.have_new_blocks(rows, table.num_known[rows], table.num_computed[rows])
            for sequence in self._open.of_rows(rows[are_new & ((counts > 1) | ~columns.samples)]):
                self._register(sequence)
        return replace(columns, logprob_queries=queries, pooling=pooling) if queries or pooling else columns

    def _look_ahead(self, columns: StepRows) -> StepRows:
        """The rows, with blocks for drafts that the backend proposes after them; nobody gives way for them."""
        if not len(columns) or (most := self._drafting.wanted(columns)) is None:
            return columns
        rows, ends = columns.numbers, columns.num_context_tokens
        # The sampled token stands after the row's tokens, and another one follows the last draft.
        wanted = np.minimum(np.maximum(self._table.most_tokens[rows] - 2 - ends, 0), most) * columns.samples
        wanted += self._drafting.spare * (wanted > 0)
        for index in (self._cache.num_steady(rows, ends) < wanted).nonzero()[0].tolist():
            first, count = int(columns.num_computed_tokens[index]), int(columns.num_tokens[index])
            wanted[index] = self._cache.allocate(int(rows[index]), first, count + int(wanted[index])) - count
        return replace(columns, lookahead=wanted.astype(np.int32))

    def _update_rows(self, step: StepRows, output: StepOutput) -> None:
        """Take in the results of a step's rows. What one row raises, or has for an error, ends its request alone."""
        table, rows, is_open = self._table, step.numbers, self._table.are_open(step)
        if output.errors:
            for index, error in output.errors.items():
                if is_open[index]:
                    self.fail(int(step.sequence_ids[index]), error)
            is_open = self._table.are_open(step)
        samples = is_open & step.samples & (output.sampled[:, 0] != NOT_SAMPLED)  # else deferred, or in a prompt
        at = samples.nonzero()[0]
        numbers, sampled = rows[at], output.sampled[at]
        counts, stopped, full = table.append_tokens(numbers, sampled)
        if not step.only_decodes:
            self._settle_drafts(step, at, output)
        if sampled.shape[1] == 1:
            self._deltas.add_tokens(step.sequence_ids[at], sampled[:, 0])
        else:
            kept = np.arange(sampled.shape[1]) < counts[:, None]
            self._deltas.add_tokens(np.repeat(step.sequence_ids[at], counts), sampled[kept])
        if output.logprobs or output.queried:
            kept_counts = np.zeros(len(rows), np.intp)
            kept_counts[at] = counts
            self._add_logprobs(step, output, kept_counts, is_open)
        need_care = stopped | full
        if self._cache.prefix_cache:
            need_care |= self._cache.have_new_blocks(numbers, table.num_known[numbers], table.num_computed[numbers])
        if len(at) == len(rows) and not np.count_nonzero(need_care):
            return  # nearly every step
        reasons: dict[int, FinishReason] = dict.fromkeys(at[full].tolist(), "length")
        reasons |= dict.fromkeys(at[stopped].tolist(), "stop")
        if len(at) < len(rows):  # the last tokens of prompts after which nothing is wanted
            are_read = is_open & ~table.samples[rows] & (step.num_context_tokens == table.most_tokens[rows] - 1)
            reasons |= dict.fromkeys(are_read.nonzero()[0].tolist(), "length")
        for index in sorted({*at[need_care].tolist(), *reasons}):
            owner = self._open.get(int(step.sequence_ids[index]))
            if owner is not None:  # else its request failed with an earlier row
                try:
                    self._register(owner)
                    if (reason := reasons.get(index)) is not None:
                        self._copies.end(owner)
                        self._deltas.end(owner, reason, output.pooled.get(index))
                        self._remove(owner)
                        self._ended_s.append(self._deltas.now_s)
                except Exception as error:  # noqa: BLE001 - one request's tokens are not the others' trouble
                    _LOG.exception("the tokens of %s could not be taken in", owner.request.request_id)
                    self.fail(owner.sequence_id, RowError.of(error, "tokens"))

    def _add_logprobs(
        self, step: StepRows, output: StepOutput, counts: NDArray[np.intp], is_open: NDArray[np.bool_]
    ) -> None:
        """Hand on the log-probabilities of tokens that rows keep, `counts` [rows] of them, and of prompts."""
        apart = output.logprobs
        if isinstance(apart, RowColumns):
            rows, columns, apart = np.array(apart.rows, np.intp), apart.columns, {}
            places = counts[rows].nonzero()[0]
            self._deltas.add_step_logprobs(step.sequence_ids[rows[places]], columns.picked(places.tolist()))
        for index, entries in apart.items():
            if count := counts.item(index):
                kept = entries if len(entries) <= count else entries[:count]
                self._deltas.add_logprobs(int(step.sequence_ids[index]), kept)
        for index, entries in output.queried.items():
            if is_open[index] and (owner := self._open.get(int(step.sequence_ids[index]))) is not None:
                self._deltas.add_prompt_logprobs(owner, entries)

    def _settle_drafts(self, step: StepRows, at: NDArray[np.intp], output: StepOutput) -> None:
        """Count the drafts of rows, named by their index, as verified; those that were wrong are computed no more."""
        drafted = at[step.num_drafts[at] > 0]
        if not len(drafted):
            return
        rows, num_sampled = step.numbers[drafted], output.num_sampled[drafted]
        self._table.num_drafts[rows] = 0
        self._table.num_computed[rows] = step.num_computed_tokens[drafted] + num_sampled
        num_drafts, num_accepted = step.num_drafts[drafted].tolist(), (num_sampled - 1).tolist()
        sequences = self._open.of_rows(rows)
        for sequence, count, accepted in zip(sequences, num_drafts, num_accepted, strict=True):
            sequence.drafts = sequence.drafts.more(count, accepted)
        counts = self._counts
        counts.num_drafts += len(drafted)
        counts.draft_tokens += sum(num_drafts)
        counts.accepted_tokens += sum(num_accepted)
        right = [sum(accepted > place for accepted in num_accepted) for place in range(max(num_accepted))]
        counts.accepted_by_place = added_by_place(counts.accepted_by_place, right)
        self._drafting.verified(sequences, num_drafts, num_accepted)

    def _register(self, sequence: Sequence) -> None:
        if sequence.running:
            self._cache.register(sequence.own_row, sequence.keys, sequence.token_ids, sequence.num_computed_tokens)

    def _forget(self, steps: Collection[ScheduledBatch]) -> None:
        """Steps in flight gave nothing: blocks and snapshots of theirs are not to be found."""
        for step in steps:
            self._finished(step)
        if self.aside.sequence is not None:  # its chunk may not have begun
            self._restart(self.aside.sequence)
        self._cache.forget()
        self._pace.lost()

    def _finished(self, step: ScheduledBatch) -> None:
        self._rows.finished(step.columns.numbers)
        self._cache.snapshots.finished(step.state_moves)

    def _preempt(self, sequence: Sequence) -> None:
        self.aside.leave(sequence)
        row = sequence.own_row
        self._copies.end(sequence)
        self._cache.free(row)
        self._table.num_computed[row] = self._table.num_proposed[row] = 0
        self._open.stop(sequence)
        self._counts.num_preemptions += 1

    def _restart(self, sequence: Sequence) -> None:
        """A sequence waits again as if it had not run, but for what it has put out."""
        if sequence.running:
            self._preempt(sequence)
        self._open.take_row(sequence)

    def _remove(self, sequence: Sequence) -> None:
        self.aside.leave(sequence)
        if sequence.row is not None:
            self._copies.end(sequence)
            self._cache.free(sequence.row)
        self._drafting.forget(sequence)
        self._deltas.close(sequence)
        self._open.remove(sequence)
