"""A scheduler on a machine whose step times are made up, and when which request got tokens."""

from __future__ import annotations

from collections.abc import Callable

from realizar.batch import ScheduledBatch
from realizar.kv_cache.manager import KVCacheManager
from realizar.request import NO_CLIENT, Client, PromptEmbeddings, Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.pace import Pace
from realizar.scheduler.scheduler import Scheduler
from step_inputs import RowOutput, ScheduledRow, rows_of, step_output, updated

GREEDY = SamplingParams(temperature=0.0)


def step_s(batch: ScheduledBatch) -> float:
    """The seconds of a step of SmolLM2: a share for the step, and one for each token that grows with its position."""
    return 2.8e-3 + sum(row.num_tokens * (5.5e-4 + 7e-7 * row.num_computed_tokens) for row in rows_of(batch))


class Run:
    """A scheduler whose clock is moved by its steps, and when which request got tokens."""

    def __init__(
        self, pace: Pace | None, seconds: Callable[[ScheduledBatch], float] = step_s, *, rows: int = 96,
        aside_tokens: int = 0,
    ) -> None:  # fmt: skip
        self._seconds = seconds
        cache = KVCacheManager(
            (None,),
            [2000],
            block_size=16,
            num_rows=rows,
            context_length=6144,
            max_step_tokens=512,
            prefix_cache=True,
        )
        self.now_s = 0.0
        self.scheduler = Scheduler(
            cache,
            pace=pace,
            clock=lambda: self.now_s,
            aside_tokens=aside_tokens,
        )
        self.tokens_s: dict[str, list[float]] = {}

    def add(
        self, name: str, prompt: tuple[int, ...], max_tokens: int = 5000, *, client: Client = NO_CLIENT, n: int = 1,
        embeddings: tuple[PromptEmbeddings, ...] = (),
    ) -> None:  # fmt: skip
        self.tokens_s[name] = []
        most = min(max_tokens, 6144 - len(prompt))
        sampling = SamplingParams(temperature=0.0, n=n)
        request = Request(name, prompt, sampling, most, arrival_s=0.0, client=client, embeddings=embeddings)
        self.scheduler.add(request)

    def step(self) -> tuple[ScheduledRow, ...]:
        batch = self.scheduler.schedule()
        self.now_s += self._seconds(batch)
        results = step_output([RowOutput((7,) if row.sample else ()) for row in rows_of(batch)])
        for output in updated(self.scheduler, batch, results):
            self.tokens_s[output.request_id].append(self.now_s)
        self.scheduler.take_closed_rows()
        return rows_of(batch)

    def started(self, streams: int) -> Run:
        """Start `streams` streams and run them until each has 30 tokens."""
        for number in range(streams):
            self.add(f"stream {number}", ids(40, number))
        while len(self.tokens_s[f"stream {streams - 1}"]) < 30:
            self.step()
        return self


def ids(count: int, number: int) -> tuple[int, ...]:
    """A prompt that begins as no other does."""
    return (number, *range(100, 99 + count))
