"""A load on a server: requests sent when they are due, or as others end, and their answers timed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from realizar.bench.serve_client import Answered, Target, send
from realizar.bench.serve_workload import PlannedRequest, Workload

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One load on one server.

    Attributes:
        answered: in the order of arrival.
        duration_s: from the start to the last end.
        generator_cpu_s: processor time that sending and timing took.
    """

    target: Target
    answered: tuple[Answered, ...]
    duration_s: float
    generator_cpu_s: float

    @property
    def good(self) -> list[Answered]:
        """Those that came whole."""
        return [each for each in self.answered if each.error is None]


def run_load(
    target: Target,
    requests: Sequence[PlannedRequest],
    work: Workload,
    *,
    timeout_s: float = 600.0,
    progress: Progress | None = None,
) -> LoadRun:
    """Put a load on a server and wait for all answers.

    Args:
        requests: of `plan_requests`.
        progress: callback with the number of ended requests, whenever one ends.

    Raises:
        InvalidRequestError: the target's address is none.
    """
    return asyncio.run(_run(target, requests, work, timeout_s, progress))


async def _run(
    target: Target,
    requests: Sequence[PlannedRequest],
    work: Workload,
    timeout_s: float,
    progress: Progress | None,
) -> LoadRun:
    gate = asyncio.Semaphore(work.concurrency) if work.concurrency is not None else None
    num_ended = 0
    cpu_start_s = time.process_time()
    start_s = time.perf_counter()

    async def one(request: PlannedRequest) -> Answered:
        nonlocal num_ended
        if gate is None:
            due_s = start_s + request.arrival_s
            await asyncio.sleep(max(due_s - time.perf_counter(), 0))
            answered = await send(target, request.prompt, request.max_tokens, due_s, timeout_s)
        else:
            async with gate:
                due_s = time.perf_counter()
                answered = await send(target, request.prompt, request.max_tokens, due_s, timeout_s)
        num_ended += 1
        if progress is not None:
            progress(num_ended)
        return answered

    answered = await asyncio.gather(*(one(request) for request in requests))
    return LoadRun(target, tuple(answered), time.perf_counter() - start_s, time.process_time() - cpu_start_s)
