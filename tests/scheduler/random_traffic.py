"""Random requests through a scheduler, whose rows and outputs are checked against texts kept in plain lists."""

from __future__ import annotations

import random
from collections import deque

from realizar.batch import FROM_PREVIOUS_STEP, ScheduledBatch
from realizar.errors import CapacityError, QueueFullError
from realizar.kv_cache.manager import KVCacheManager
from realizar.outputs import RowError, TokenLogprobs
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.drafts import Drafting, PromptLookup
from realizar.scheduler.pace import Pace, Policy
from realizar.scheduler.scheduler import Scheduler
from step_inputs import RowOutput, ScheduledRow, rows_of, step_output, taken, updated

CONTEXT = 40
IDS = 5
LOGPROBS = TokenLogprobs(1, -1.0, 1, ())


class Traffic:
    """One scheduler under load.

    Attributes:
        texts: the tokens of each choice of a request that are known.
        num_outputs: outputs that were checked.
    """

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        windows = rng.choice([(None,), (None,), (None, 6), (5,), (4, 9)])
        rows, step_tokens = rng.choice([3, 6]), rng.choice([6, 12, 24])
        drafts = rng.choice([0, 0, 0, 2])
        self.now = 0.0
        self.cache = KVCacheManager(
            windows,
            [rng.choice([12, 16, 30])] * len(windows),
            block_size=rng.choice([2, 4]),
            num_rows=rows,
            context_length=CONTEXT,
            max_step_tokens=step_tokens,
            prefix_cache=rng.random() < 0.7,
        )
        self.scheduler = Scheduler(
            self.cache,
            max_queued=8,
            policy=Policy(rng.choice(["decode", "decode", "prefill"])),
            pace=Pace(2.5, 4) if rng.random() < 0.5 else None,
            drafting=Drafting(PromptLookup(drafts, 2, 1), drafts, IDS, rows) if drafts else None,
            clock=self.clock,
        )
        self.in_flight: deque[ScheduledBatch] = deque()
        self.most_in_flight = rng.choice([1, 2])
        self.kind = rng.choice(["plain", "plain", "mixed"])
        self.number = self.num_outputs = 0
        self.texts: dict[tuple[str, int], list[int]] = {}

    def clock(self) -> float:
        self.now += 0.01
        return self.now

    def run(self, arrivals: int) -> None:
        """Serve so many requests, and audit after every step."""
        while self.number < arrivals or self.scheduler.has_work or self.in_flight:
            if self.number < arrivals and self.rng.random() < 0.5:
                self._add()
            if self.rng.random() < 0.03:
                self.scheduler.abort(str(self.rng.randrange(self.number + 1)), self.rng.choice([None, 0]))
            self._step()
            self.scheduler.audit()
            self.cache.audit()

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
            return
        self.texts |= {(request.request_id, choice): list(prompt) for choice in range(sampling.n)}

    def _step(self) -> None:
        self.scheduler.take_closed_rows()
        batch = self.scheduler.schedule()
        for row in rows_of(batch):
            self._check_row(row)
        if rows_of(batch):
            self.in_flight.append(batch)
        most = self.most_in_flight - 1
        if not rows_of(batch):
            most = max(len(self.in_flight) - 1, 0)
        elif most and self.scheduler.awaits(batch):
            most = 0
        if rows_of(batch) and self.rng.random() < 0.02:
            steps = list(self.in_flight)
            self.in_flight.clear()
            self.rng.choice([self.scheduler.lose, self.scheduler.try_smaller])(steps, RowError("lost"))
            taken(self.scheduler)
        while len(self.in_flight) > most:
            done = self.in_flight.popleft()
            results = [self._output(row) for row in rows_of(done)]
            expected = self._expected(done, results)
            outputs = updated(self.scheduler, done, step_output(results))
            failed = {output.request_id for output in outputs if output.error is not None}
            assert failed == {name for (name, _), gain in expected.items() if gain is None}
            found = {(each.request_id, each.choice): each for each in outputs if each.error is None}
            assert len(found) + len(failed) == len(outputs)
            for key, gain in expected.items():
                if gain is not None and key[0] not in failed:
                    tokens, reason = gain
                    assert (found[key].token_ids, found[key].finish_reason) == (tokens, reason)
                    assert found[key].stop_token_id == (tokens[-1] if reason == "stop" else None)
                    self.texts[key] += tokens
                    self.num_outputs += 1
            assert found.keys() == {key for key, gain in expected.items() if gain and key[0] not in failed}

    def _key(self, row: ScheduledRow) -> tuple[str, int] | None:
        """The request and choice of a row, unless it has ended or left the row."""
        sequence = self.scheduler._open.get(row.sequence_id)
        return None if sequence is None or sequence.row != row.row else (sequence.request.request_id, sequence.choice)

    def _check_row(self, row: ScheduledRow) -> None:
        key = self._key(row)
        assert key is not None
        text, start = self.texts[key], row.num_computed_tokens
        own = row.token_ids[: row.num_tokens - row.num_drafts]
        assert list(own) == [*text, FROM_PREVIOUS_STEP][start : start + len(own)]
        assert row.num_tokens > row.num_drafts
        assert not row.num_drafts or (row.sample and start + 1 == len(text))
        size = self.cache.block_size
        for group in self.cache._groups:
            assert group.end[row.row] * size >= row.num_context_tokens

    def _expected(
        self, done: ScheduledBatch, results: list[RowOutput]
    ) -> dict[tuple[str, int], tuple[tuple[int, ...], str | None] | None]:
        """What each row's choice gains, and why it ends; None where its request fails."""
        expected: dict[tuple[str, int], tuple[tuple[int, ...], str | None] | None] = {}
        for row, result in zip(rows_of(done), results, strict=True):
            key = self._key(row)
            if key is None:
                continue
            sequence = self.scheduler._open.get(row.sequence_id)
            assert sequence is not None
            request = sequence.request
            if result.error is not None:
                expected[key] = None
                continue
            tokens, reason = [], None
            for token_id in result.token_ids:
                tokens.append(token_id)
                count = len(self.texts[key]) + len(tokens) - request.num_prompt_tokens
                if token_id in request.sampling.stop_token_ids and count > request.sampling.min_tokens:
                    reason = "stop"
                elif count == request.max_tokens:
                    reason = "length"
                if reason is not None:
                    break
            if request.max_tokens == 0 and row.num_context_tokens == request.num_prompt_tokens:
                reason = "length"
            if tokens or reason is not None or result.queried:
                expected[key] = tuple(tokens), reason
        return expected

    def _output(self, row: ScheduledRow) -> RowOutput:
        rng = self.rng
        if rng.random() < 0.003:
            return RowOutput((), error=RowError("bad"))
        queried = (LOGPROBS,) * len(row.logprob_queries)
        if not row.sample:
            return RowOutput((), queried=queried)
        sampled: list[int] = []
        for draft in (*row.draft_ids, None):
            sampled.append(rng.randrange(IDS) if draft is None or rng.random() < 0.4 else draft)
            if sampled[-1] != draft:
                break
        logprobs = (LOGPROBS,) * len(sampled) if self.kind == "mixed" and row.sequence_id % 3 == 0 else ()
        return RowOutput(tuple(sampled), logprobs, queried)
