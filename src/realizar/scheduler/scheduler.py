"""`Scheduler`: continuous batching, one step at a time.

A step has a budget of tokens: one for each running sequence that decodes, then chunks of prompts, then prompts of those
that wait, first come, first served. When blocks run out, the sequence that came last gives its blocks up and is
computed again later. A step may be scheduled before the one before it is done: tokens not known yet are
FROM_PREVIOUS_STEP, and what comes for a sequence that has ended meanwhile is dropped.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from realizar.batch import OpenedRow, ScheduledBatch, ScheduledRow
from realizar.errors import CapacityError, ContextLengthError, InvalidRequestError
from realizar.kv_cache.manager import KVCacheManager
from realizar.outputs import FinishReason, TokenLogprobs, TokenOutput
from realizar.request import Request
from realizar.scheduler.policy import Policy, order
from realizar.scheduler.rows import RowPool
from realizar.scheduler.sequence import Sequence


class RowResult(Protocol):
    """What the scheduler reads of a row's output; `backends.base.RowOutput` is one."""

    @property
    def row(self) -> int: ...
    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]: ...
    @property
    def queried(self) -> tuple[TokenLogprobs, ...]: ...


@dataclass(frozen=True, slots=True)
class SchedulerCounts:
    """Sequences by state, and preemptions since the start."""

    running: int
    waiting: int
    preemptions: int


class _Plan:
    """A step in the making: tokens per sequence, and the budget left."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.tokens: dict[Sequence, int] = {}
        self.opened: list[OpenedRow] = []

    def add(self, sequence: Sequence, count: int) -> None:
        self.tokens[sequence] = count
        self.budget -= count

    def remove(self, sequence: Sequence) -> None:
        self.budget += self.tokens.pop(sequence, 0)


class Scheduler:
    """Owns waiting and running sequences and the rows they run in.

    Args:
        cache: owner of the KV blocks; used by nobody else.
        max_running: sequences in one step.
        max_step_tokens: tokens in one step.
        context_length: tokens of a request, prompt and output.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        *,
        max_running: int,
        max_step_tokens: int,
        context_length: int,
        policy: Policy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._max_step_tokens = max_step_tokens
        self._context_length = context_length
        self._policy = policy or Policy()
        self._clock = clock
        self._rows = RowPool(max_running)
        self._ids: Iterator[int] = itertools.count()
        self._sequences: dict[int, Sequence] = {}
        self._requests: dict[str, dict[int, Sequence]] = {}
        self._waiting: list[Sequence] = []  # sorted by `order`
        self._running: list[Sequence] = []  # sorted by `order`
        self._preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether any sequence is open."""
        return bool(self._sequences)

    @property
    def max_request_tokens(self) -> int:
        """Tokens of the longest request that can run: the context, or what the KV cache holds if that is less."""
        return min(self._context_length, self._cache.max_tokens)

    @property
    def counts(self) -> SchedulerCounts:
        return SchedulerCounts(len(self._running), len(self._waiting), self._preemptions)

    def add(self, request: Request) -> None:
        """Queue a request, each choice as a sequence of its own.

        Raises:
            InvalidRequestError: an empty prompt, or an id in use.
            ContextLengthError: prompt and output exceed the context.
            CapacityError: the KV cache could not hold it even alone.
        """
        if not request.prompt_token_ids:
            raise InvalidRequestError("the prompt is empty", "prompt")
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", "request_id")
        prompt, total = request.num_prompt_tokens, request.num_prompt_tokens + request.max_tokens
        if total > self._context_length:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens and {request.max_tokens} are to be generated: together {total}, "
                f"above the context of {self._context_length}",
                "prompt" if prompt >= self._context_length else "max_tokens",
            )
        stored = max(prompt, total - 1)  # the last token is never read back
        if not self._cache.holds(stored):
            raise CapacityError(
                f"the request needs KV cache for {stored} tokens; the {'+'.join(map(str, self._cache.num_blocks))} "
                f"blocks of {self._cache.block_size} tokens hold at most {self._cache.max_tokens}"
            )
        choices = self._requests[request.request_id] = {}
        for choice in range(request.sampling.n):
            sequence = Sequence(next(self._ids), request, choice)
            self._sequences[sequence.sequence_id] = choices[choice] = sequence
            bisect.insort(self._waiting, sequence, key=order)

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """End a request, or one choice of it, without an output; its blocks are free at once. Unknown ids pass."""
        for sequence in list(self._requests.get(request_id, {}).values()):
            if choice is None or sequence.choice == choice:
                self._remove(sequence)

    def take_closed_rows(self) -> list[int]:
        """Rows that ended and that no submitted step names any more: to be closed in the backend now."""
        return self._rows.take_closed()

    def schedule(self) -> ScheduledBatch:
        """Decide the next step; without rows when nothing can run before a submitted step is done."""
        plan = _Plan(self._max_step_tokens)
        decoding: list[Sequence] = []
        prefilling: list[Sequence] = []
        for sequence in self._running:
            remaining = sequence.num_remaining_tokens
            if remaining:  # else its last token is on its way
                (decoding if remaining == 1 else prefilling).append(sequence)
        if self._policy.first == "prefill":
            self._schedule_running(prefilling, plan)
            self._admit(plan)
            if not plan.tokens:
                self._schedule_running(decoding, plan)
        else:
            self._schedule_running(decoding, plan)
            self._schedule_running(prefilling, plan)
            self._admit(plan)
        batch = ScheduledBatch(
            rows=tuple(self._advance(sequence, count) for sequence, count in plan.tokens.items()),
            opened=tuple(plan.opened),
        )
        self._rows.submitted(row.row for row in batch.rows)
        return batch

    def update(self, batch: ScheduledBatch, results: Iterable[RowResult]) -> list[TokenOutput]:
        """Take in what a step gave: `results` are in the order of the batch's rows. Steps come back in order."""
        now = self._clock()
        outputs: list[TokenOutput] = []
        for scheduled, result in zip(batch.rows, results, strict=True):
            if scheduled.row != result.row:
                raise RuntimeError(f"the backend answered for row {result.row} in place of row {scheduled.row}")
            sequence = self._sequences.get(scheduled.sequence_id)
            if sequence is not None:
                output = self._take_in(sequence, scheduled, result, now)
                if output is not None:
                    outputs.append(output)
        self._rows.finished(row.row for row in batch.rows)
        return outputs

    def audit(self) -> None:
        """Prove that rows and sequences belong together.

        Raises:
            RuntimeError: they don't.
        """
        rows = [sequence.row for sequence in self._sequences.values() if sequence.row is not None]
        if len(set(rows)) != len(rows) or any(sequence.row is None for sequence in self._running):
            raise RuntimeError("a running sequence has no row of its own")
        if not all(s.running for s in self._running) or any(s.running for s in self._waiting):
            raise RuntimeError("a sequence is in the wrong list")
        ids = [sequence.sequence_id for sequence in (*self._running, *self._waiting)]
        by_request = [sequence.sequence_id for choices in self._requests.values() for sequence in choices.values()]
        if sorted(ids) != sorted(self._sequences) or sorted(by_request) != sorted(ids):
            raise RuntimeError("a sequence is lost or listed twice")

    def _schedule_running(self, sequences: list[Sequence], plan: _Plan) -> None:
        for sequence in sequences:
            if plan.budget == 0:
                break
            if sequence.running:  # else preempted a moment ago
                self._take_blocks(sequence, _row_of(sequence), plan)

    def _take_blocks(self, sequence: Sequence, row: int, plan: _Plan) -> None:
        """Schedule what the budget and the blocks allow, preempting those that came later until a token fits."""
        wanted = min(sequence.num_remaining_tokens, plan.budget)
        while sequence.running:
            count = self._cache.allocate(row, sequence.num_computed_tokens, wanted)
            if count:
                plan.add(sequence, count)
                return
            victim = self._running[-1]
            plan.remove(victim)
            self._preempt(victim)

    def _admit(self, plan: _Plan) -> None:
        """Start those that wait, in their order, while rows, blocks and budget last."""
        while self._waiting and plan.budget:
            sequence = self._waiting[0]
            room = not self._running or self._cache.can_allocate(sequence.num_tokens)  # alone, it always fits
            if sequence.num_pending or not room:
                return
            if sequence.row is None:
                if not self._rows.num_free:
                    return
                sequence.row = self._rows.take()
                sequence.scheduled_s = self._clock()
                plan.opened.append(sequence.opened(sequence.row))
            self._waiting.pop(0)
            sequence.running = True
            bisect.insort(self._running, sequence, key=order)
            self._take_blocks(sequence, sequence.row, plan)

    def _advance(self, sequence: Sequence, count: int) -> ScheduledRow:
        """The sequence's part of the batch; from now on its tokens count as computed."""
        sample = count == sequence.num_remaining_tokens and sequence.request.max_tokens > 0
        scheduled = ScheduledRow(
            sequence_id=sequence.sequence_id,
            row=_row_of(sequence),
            token_ids=sequence.next_tokens(count),
            num_computed_tokens=sequence.num_computed_tokens,
            sample=sample,
            logprob_queries=sequence.take_queries(count),
        )
        sequence.num_computed_tokens += count
        sequence.num_pending += sample
        return scheduled

    def _take_in(
        self, sequence: Sequence, scheduled: ScheduledRow, result: RowResult, now: float
    ) -> TokenOutput | None:
        request = sequence.request
        finish: FinishReason | None = None
        stop_token_id: int | None = None
        gained: list[int] = []
        if scheduled.sample:
            sequence.num_pending -= 1
            for token_id in result.token_ids:
                gained.append(token_id)
                sequence.token_ids.append(token_id)
                num_tokens = len(sequence.token_ids)
                least = sequence.num_prompt_tokens + request.sampling.min_tokens
                if token_id in sequence.stop_token_ids and num_tokens > least:
                    finish, stop_token_id = "stop", token_id
                elif num_tokens >= sequence.most_tokens:
                    finish = "length"
                if finish is not None:
                    break
        elif request.max_tokens == 0:
            end = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
            finish = "length" if end == sequence.num_prompt_tokens else None
        if finish is not None:
            self._remove(sequence)
        if not gained and not result.queried and finish is None:
            return None
        return TokenOutput(
            request_id=request.request_id,
            choice=sequence.choice,
            token_ids=tuple(gained),
            scheduled_s=now if sequence.scheduled_s is None else sequence.scheduled_s,
            produced_s=now,
            logprobs=result.logprobs[: len(gained)],
            prompt_logprobs=result.queried,
            finish_reason=finish,
            stop_token_id=stop_token_id,
        )

    def _preempt(self, sequence: Sequence) -> None:
        """Take the blocks away; the sequence is computed again from its first token, in the row it has."""
        self._running.remove(sequence)
        self._cache.free(_row_of(sequence))
        sequence.running = False
        sequence.num_computed_tokens = 0
        bisect.insort(self._waiting, sequence, key=order)
        self._preemptions += 1

    def _remove(self, sequence: Sequence) -> None:
        (self._running if sequence.running else self._waiting).remove(sequence)
        if sequence.row is not None:
            self._cache.free(sequence.row)
            self._rows.release(sequence.row)
        del self._sequences[sequence.sequence_id]
        choices = self._requests[sequence.request.request_id]
        del choices[sequence.choice]
        if not choices:
            del self._requests[sequence.request.request_id]


def _row_of(sequence: Sequence) -> int:
    if sequence.row is None:
        raise RuntimeError("a running sequence has no row")
    return sequence.row
