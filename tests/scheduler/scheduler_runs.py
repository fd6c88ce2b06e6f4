"""A scheduler without an engine: what it is asked, what it answers, and steps whose sampled tokens the test names."""

from __future__ import annotations

from realizar.batch import ScheduledBatch
from realizar.kv_cache.manager import KVCacheManager
from realizar.request import Request
from realizar.sampling_params import SamplingParams
from realizar.scheduler.drafts import Drafting, PromptLookup
from realizar.scheduler.pace import Policy
from realizar.scheduler.scheduler import Scheduler
from step_inputs import RowOutput, TokenOutput, rows_of, step_output, updated


class Clock:
    """A second later with every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def make_scheduler(
    *,
    num_blocks: int = 100,
    max_running: int = 4,
    max_step_tokens: int = 10,
    max_queued: int | None = None,
    policy: Policy | None = None,
    drafts: int = 0,
    proposed: int = 0,
    windows: tuple[int | None, ...] = (None,),
    has_state: bool = False,
    num_snapshots: int = 0,
) -> Scheduler:
    """Blocks of 2 tokens; drafts follow the last 1 to 3 tokens, beside `proposed` of the backend."""
    cache = KVCacheManager(
        windows,
        [num_blocks] * len(windows),
        block_size=2,
        num_rows=max_running,
        context_length=100,
        max_step_tokens=max_step_tokens,
        has_state=has_state,
        num_snapshots=num_snapshots,
    )
    return Scheduler(
        cache,
        max_queued=max_queued,
        policy=policy,
        drafting=Drafting(PromptLookup(drafts, 3, 1), drafts, 1000, max_running, proposed) if drafts else None,
        clock=Clock(),
    )


def request(
    name: str,
    prompt: int | tuple[int, ...],
    max_tokens: int = 20,
    n: int = 1,
    stop: tuple[int, ...] = (),
    priority: int = 0,
    salt: str | None = "",
    marks: tuple[int, ...] = (),
) -> Request:
    """A prompt of ids 1, 2, 3, ..., or the ids given; with an empty salt, nobody shares its blocks."""
    ids = tuple(range(1, prompt + 1)) if isinstance(prompt, int) else prompt
    sampling = SamplingParams(n=n, seed=1, stop_token_ids=stop)
    salt = name if salt == "" else salt
    return Request(
        name, ids, sampling, max_tokens, arrival_s=0.0, priority=priority, cache_salt=salt, prompt_marks=marks
    )


def shape(batch: ScheduledBatch) -> list[tuple[int, int, int, bool]]:
    """Per row: its number, tokens before, tokens now, whether it is sampled."""
    return [(row.row, row.num_computed_tokens, row.num_tokens, row.sample) for row in rows_of(batch)]


def answer(scheduler: Scheduler, batch: ScheduledBatch, token_id: int = 50) -> list[TokenOutput]:
    """Every row that is sampled chooses `token_id`."""
    rows = [RowOutput((token_id,) if row.sample else ()) for row in rows_of(batch)]
    return updated(scheduler, batch, step_output(rows))


def step(scheduler: Scheduler) -> list[tuple[int, int, int, bool]]:
    """A whole step, audited, as its `shape`."""
    batch = scheduler.schedule()
    if batch.num_rows:
        answer(scheduler, batch)
    scheduler.take_closed_rows()
    scheduler.audit()
    return shape(batch)
