"""One process's part of a mix: its clients, each of which sends a request, reads the answer or leaves, and goes on."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from realizar.bench.mix.dialects import Dialect
from realizar.bench.mix.requests import MixRequest, MixWork, draw_request
from realizar.bench.serve_client import Answered, Target, send_call

try:
    import uvloop
except ImportError:  # not on Windows
    _LOOP_FACTORY = None
else:
    _LOOP_FACTORY = uvloop.new_event_loop

_GRACE_S = 5.0
"""After a load by seconds, answers that are under way get so long to end; then their clients leave."""


@dataclass(frozen=True, slots=True)
class Served:
    """A request and its answer, times in seconds of `time.perf_counter`.

    Attributes:
        due_s: when it was due. first_s: when its first text came, if any did. ended_s: when it ended.
        prompt_tokens: the server's count, or 0. output_tokens: the server's count, else the deltas.
        num_deltas: of text. num_within: those that came within the load's time.
        gaps_s: float32, between one delta and the next of its choice; deltas of one read have none. median_gap_s: 0
            where there are none.
        error: the reason of a failure, or None.
        left: the client left before the end, as it was asked to.
        was_cut: it was under way when the load's time was over, and its client left for that alone.
    """

    kind: str
    num_words: int
    max_tokens: int
    was_shortened: bool
    due_s: float
    first_s: float | None
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    num_deltas: int
    num_within: int
    gaps_s: NDArray[np.float32]
    median_gap_s: float
    error: str | None
    left: bool
    was_cut: bool

    @classmethod
    def of(cls, request: MixRequest, answered: Answered, end_s: float, *, was_cut: bool = False) -> Served:
        """The figures of an answer, without its deltas: a load may have millions. `end_s` ends the load's time."""
        gaps_s = np.asarray(answered.gaps_s, np.float32)
        gaps_s = gaps_s[gaps_s > 0]
        return cls(
            kind=request.kind,
            num_words=request.num_words,
            max_tokens=request.max_tokens,
            was_shortened=request.was_shortened,
            due_s=answered.due_s,
            first_s=answered.deltas_s[0] if answered.deltas_s else None,
            ended_s=answered.ended_s,
            prompt_tokens=answered.prompt_tokens,
            output_tokens=answered.output_tokens,
            num_deltas=len(answered.deltas_s),
            num_within=bisect_right(answered.deltas_s, end_s),
            gaps_s=gaps_s,
            median_gap_s=float(np.median(gaps_s)) if len(gaps_s) else 0.0,
            error=answered.error,
            left=answered.left and not was_cut,
            was_cut=was_cut,
        )


@dataclass(frozen=True, slots=True)
class Part:
    """One process's part of a load.

    Attributes:
        number, of: the part, of how many.
        start_s: of `time.perf_counter`, when the load begins.
    """

    number: int
    of: int
    start_s: float


@dataclass(frozen=True, slots=True)
class PartResult:
    """The answers of a part of a load.

    Attributes:
        served: in the order of their ends.
        cpu_share: of one core that the process took until the load's end.
    """

    served: list[Served]
    cpu_share: float


def run_part(target: Target, dialect: Dialect, work: MixWork, part: Part, timeout_s: float) -> PartResult:
    """Send a part's requests and wait for the answers.

    Raises:
        InvalidRequestError: the target's address is none.
        UnknownFieldsError: the server does not know a field of a kind.
    """
    gc.collect()
    gc.freeze()  # what is loaded need not be looked through while answers are timed
    try:
        with asyncio.Runner(loop_factory=_LOOP_FACTORY) as runner:
            return runner.run(_Clients(target, dialect, work, part, timeout_s).run())
    finally:
        gc.unfreeze()


class _Clients:
    """The clients of one process."""

    def __init__(self, target: Target, dialect: Dialect, work: MixWork, part: Part, timeout_s: float) -> None:
        self._target, self._dialect, self._work, self._part = target, dialect, work, part
        self._timeout_s = timeout_s
        self._end_s = float("inf") if work.seconds is None else part.start_s + work.seconds
        self._served: list[Served] = []
        count = itertools.count() if work.num_requests is None else range(work.num_requests)
        self._numbers = iter(itertools.islice(count, part.number, None, part.of))

    async def run(self) -> PartResult:
        await asyncio.sleep(max(0.0, self._part.start_s - time.perf_counter()))
        cpu_start_s, start_s = time.process_time(), time.perf_counter()
        if self._work.concurrency is None:
            await self._at_arrivals()
        else:
            clients = len(range(self._part.number, self._work.concurrency, self._part.of))
            await asyncio.gather(*(self._one_after_another() for _ in range(clients)))
        wall_s = max(time.perf_counter() - start_s, 1e-9)
        return PartResult(self._served, (time.process_time() - cpu_start_s) / wall_s)

    async def _one_after_another(self) -> None:
        """One client's requests, at least one."""
        has_begun = False
        for number in self._numbers:
            request = draw_request(self._work, number, self._dialect, self._target.model)
            now_s = time.perf_counter()
            if has_begun and now_s >= self._end_s:
                return
            has_begun = True
            await self._serve(request, now_s)

    async def _at_arrivals(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number, due_s in zip(self._numbers, self._arrivals(), strict=False):
                if due_s >= self._end_s:
                    return
                request = draw_request(self._work, number, self._dialect, self._target.model)
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
                tasks.create_task(self._serve(request, due_s))

    def _arrivals(self) -> Iterator[float]:
        """The times of this part's requests; every process draws those of all."""
        rng, rate_per_s = random.Random(self._work.seed), self._work.rate_per_s or 1.0
        times = itertools.accumulate((rng.expovariate(rate_per_s) for _ in itertools.count()), initial=0.0)
        return (
            self._part.start_s + time_s for time_s in itertools.islice(times, self._part.number, None, self._part.of)
        )

    async def _serve(self, request: MixRequest, due_s: float) -> None:
        call, cut_s = request.call, self._end_s + _GRACE_S - time.perf_counter()
        may_be_cut = call.leave_after_s is None or call.leave_after_s > cut_s
        if may_be_cut:
            call = replace(call, leave_after_s=cut_s)
        answered = await send_call(self._target, call, due_s, self._timeout_s)
        has_left = call.leave_after_deltas is not None and len(answered.deltas_s) >= call.leave_after_deltas
        was_cut = answered.left and may_be_cut and not has_left
        self._served.append(Served.of(request, answered, self._end_s, was_cut=was_cut))
