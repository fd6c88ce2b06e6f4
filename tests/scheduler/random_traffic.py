"""Random requests through a scheduler, and a trace of everything that it decides and puts out."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from realizar.batch import RowOutput, ScheduledBatch, ScheduledRow, StepOutput
from realizar.cache_kinds import attention_cache
from realizar.errors import CapacityError, QueueFullError
from realizar.kv_cache.manager import KVCacheManager
from realizar.outputs import RowError, TokenLogprobs
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.drafting import Drafting
from realizar.scheduler.drafts import PromptLookup
from realizar.scheduler.pace import Pace
from realizar.scheduler.policy import Policy
from realizar.scheduler.scheduler import Scheduler

CONTEXT = 40
IDS = 5
LOGPROBS = TokenLogprobs(1, -1.0, 1, ())


class Traffic:
    """One scheduler under load. The same seed asks the same of any scheduler that decides the same.

    Attributes:
        trace: what was scheduled, put out and counted, step by step.
    """

    def __init__(self, seed: int, new_scheduler: Callable[..., Scheduler] = Scheduler) -> None:
        self.rng = rng = random.Random(seed)
        windows = rng.choice([(None,), (None,), (None, 6), (5,), (4, 9)])
        rows, step_tokens = rng.choice([3, 6]), rng.choice([6, 12, 24])
        drafts = rng.choice([0, 0, 0, 2])
        self.now = 0.0
        self.cache = KVCacheManager(
            [attention_cache(window) for window in windows],
            [rng.choice([12, 16, 30])] * len(windows),
            block_size=rng.choice([2, 4]),
            num_rows=rows,
            context_length=CONTEXT,
            max_step_tokens=step_tokens,
            prefix_cache=rng.random() < 0.7,
        )
        self.scheduler = new_scheduler(
            self.cache,
            max_running=rows,
            max_step_tokens=step_tokens,
            context_length=CONTEXT,
            max_queued=8,
            policy=Policy(rng.choice(["decode", "decode", "prefill"])),
            pace=Pace(2.5, 4) if rng.random() < 0.5 else None,
            drafting=Drafting(PromptLookup(drafts, 2, 1), drafts, IDS) if drafts else None,
            clock=self.clock,
        )
        self.in_flight: deque[ScheduledBatch] = deque()
        self.most_in_flight = rng.choice([1, 2])
        self.kind = rng.choice(["plain", "plain", "mixed"])
        self.number = 0
        self.trace: list[object] = []

    def clock(self) -> float:
        self.now += 0.01
        return self.now

    def run(self, arrivals: int) -> list[object]:
        """Serve so many requests, and audit after every step."""
        while self.number < arrivals or self.scheduler.has_work or self.in_flight:
            if self.number < arrivals and self.rng.random() < 0.5:
                self._add()
            if self.rng.random() < 0.03:
                self.scheduler.abort(str(self.rng.randrange(self.number + 1)), self.rng.choice([None, 0]))
            self._step()
            self.scheduler.audit()
            self.trace.append((self.cache.audit(), self.scheduler.counts))
        return self.trace

    def _add(self) -> None:
        rng = self.rng
        self.number += 1
        length = rng.choice([1, 2, 5, 9, 14])
        prompt = tuple((place * place) % 3 if rng.random() < 0.9 else 4 for place in range(length))
        mixed = self.kind == "mixed"
        pooling = rng.choice(["last", "mean"]) if mixed and rng.random() < 0.1 else None
        sampling = SamplingParams(
            seed=rng.randrange(3),
            n=rng.choice([1, 1, 1, 3]) if pooling is None else 1,
            min_tokens=rng.choice([0, 0, 4]),
            stop_token_ids=rng.choice([(), (3,), (3, 4), (-1, 2**40, 3), tuple(range(3, 30))]),
            logprobs=rng.choice([None, None, 1]) if mixed else None,
            prompt_logprobs=rng.choice([None, None, None, 1]) if mixed else None,
        )
        most = 0 if pooling is not None or (mixed and rng.random() < 0.05) else rng.randrange(1, CONTEXT - length)
        salt = rng.choice([None, None, "a"])
        priority = rng.choice([0, 0, 0, -1, 2])
        request = Request(
            str(self.number), prompt, sampling, most, 0.0, priority=priority, cache_salt=salt, pooling=pooling
        )
        try:
            self.scheduler.add(request)
        except (QueueFullError, CapacityError):
            self.trace.append("refused")

    def _step(self) -> None:
        for row in self.scheduler.take_closed_rows():
            self.trace.append(("closed", row))
        batch = self.scheduler.schedule()
        self.trace.append((batch.rows, batch.opened))
        for row in batch.rows:  # the blocks of every row
            self.trace.append([group.tables[row.row].tolist() for group in self.cache._groups])
        if batch.rows:
            self.in_flight.append(batch)
        most = self.most_in_flight - 1
        if not batch.rows:
            most = max(len(self.in_flight) - 1, 0)
        elif most and self.scheduler.awaits(batch):
            most = 0
        if batch.rows and self.rng.random() < 0.02:
            steps = list(self.in_flight)
            self.in_flight.clear()
            give_up = self.rng.choice([self.scheduler.lose, self.scheduler.try_smaller])
            self.trace.append(give_up(steps, RowError("lost")))
        while len(self.in_flight) > most:
            done = self.in_flight.popleft()
            self.trace.append(self.scheduler.update(done, StepOutput.of([self._output(row) for row in done.rows])))

    def _output(self, row: ScheduledRow) -> RowOutput:
        rng = self.rng
        if rng.random() < 0.003:
            return RowOutput(row.row, (), error=RowError("bad"))
        queried = (LOGPROBS,) * len(row.logprob_queries)
        if not row.sample:
            return RowOutput(row.row, (), queried=queried)
        chosen: list[int] = []
        for draft in (*row.draft_ids, None):
            chosen.append(rng.randrange(IDS) if draft is None or rng.random() < 0.4 else draft)
            if chosen[-1] != draft:
                break
        logprobs = (LOGPROBS,) * len(chosen) if self.kind == "mixed" and row.sequence_id % 3 == 0 else ()
        return RowOutput(row.row, tuple(chosen), logprobs, queried)
