"""A load on a server: its clients, in one process or in several where one core would be the bound.

A request is due when it arrives, or when another has ended where no more may be open.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import multiprocessing
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Self

from realizar.backends.machine import num_processors
from realizar.bench.serve.client import Answer, Server, send
from realizar.bench.serve.workload import PlannedRequest, Workload, draw_request
from realizar.errors import CapacityError, InvalidRequestError

try:
    import uvloop
except ImportError:  # not on Windows
    _LOOP_FACTORY = None
else:
    _LOOP_FACTORY = uvloop.new_event_loop

_GRACE_S = 5.0
"""After a load by seconds, answers that are under way get so long to end; then their clients leave."""
_CORES_A_GENERATOR = 4
_MOST = 8
_START_S = 0.2  # until all processes have taken up their parts


def default_generators() -> int:
    """Processes for a load, where the machine also runs the server: one for each four cores, 8 at the most."""
    return max(1, min(_MOST, num_processors() // _CORES_A_GENERATOR))


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One load on one server.

    Attributes:
        start_s: of `time.perf_counter`.
        duration_s: in which tokens are counted: the load's seconds, or until the last end.
        answers: in no order.
        busy: share of a core that each generator took, the highest first.
    """

    start_s: float
    duration_s: float
    answers: list[Answer]
    busy: tuple[float, ...]

    @property
    def end_s(self) -> float:
        """Of `time.perf_counter`, when no token is counted any more."""
        return self.start_s + self.duration_s


class Generators:
    """Processes that send requests and time the answers; one works within this process. Use it as a context manager."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise InvalidRequestError(f"generators must be at least 1, not {count}", "generators")
        self._count = count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        if self._count > 1:
            self._pool = ProcessPoolExecutor(self._count, multiprocessing.get_context("spawn"))
            list(self._pool.map(time.sleep, [_START_S] * self._count))
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(self, server: Server, work: Workload, timeout_s: float) -> LoadRun:
        """Put a load on a server and wait for all answers.

        InvalidRequestError: the server's address is none. UnknownFieldsError: it does not know a field of a kind.
        CapacityError: a process of the generator died.
        """
        if self._pool is None:
            start_s = time.perf_counter()
            results = [_run_part(server, work, _Part(0, 1, start_s), timeout_s)]
        else:
            start_s = time.perf_counter() + _START_S
            parts = [_Part(number, self._count, start_s) for number in range(self._count)]
            futures = [self._pool.submit(_run_part, server, work, part, timeout_s) for part in parts]
            try:
                results = [future.result() for future in futures]
            except BrokenProcessPool:
                raise CapacityError("a process of the load generator died") from None
        answers = [each for found, _ in results for each in found]
        last_s = max((each.ended_s for each in answers), default=start_s)
        duration_s = work.seconds if work.seconds is not None else max(last_s - start_s, 1e-9)
        return LoadRun(start_s, duration_s, answers, tuple(sorted((share for _, share in results), reverse=True)))


@dataclass(frozen=True, slots=True)
class _Part:
    """Part `number` of `of` of a load, which begins at `start_s` of `time.perf_counter`."""

    number: int
    of: int
    start_s: float


def _run_part(server: Server, work: Workload, part: _Part, timeout_s: float) -> tuple[list[Answer], float]:
    """The answers of a part in the order of their ends, and the share of a core that the process took."""
    gc.collect()
    is_first = not gc.get_freeze_count()
    gc.freeze()  # what is loaded need not be looked through while answers are timed
    try:
        with asyncio.Runner(loop_factory=_LOOP_FACTORY) as runner:
            return runner.run(_Clients(server, work, part, timeout_s).run())
    except ExceptionGroup as group:
        raise group.exceptions[0] from None  # an address or a field that is wrong is so for every request
    finally:
        if is_first:  # what somebody froze before stays so
            gc.unfreeze()


class _Clients:
    def __init__(self, server: Server, work: Workload, part: _Part, timeout_s: float) -> None:
        self._server, self._work, self._part, self._timeout_s = server, work, part, timeout_s
        self._end_s = math.inf if work.seconds is None else part.start_s + work.seconds
        self._answers: list[Answer] = []

    async def run(self) -> tuple[list[Answer], float]:
        await asyncio.sleep(max(0.0, self._part.start_s - time.perf_counter()))
        cpu_start_s, start_s = time.process_time(), time.perf_counter()
        if self._work.concurrency is None:
            await self._send_all(None)
        elif most_open := len(range(self._part.number, self._work.concurrency, self._part.of)):
            await self._send_all(most_open)
        wall_s = max(time.perf_counter() - start_s, 1e-9)
        return self._answers, (time.process_time() - cpu_start_s) / wall_s

    async def _send_all(self, most_open: int | None) -> None:
        """Send requests as they are due; of a limited number the first ones in any case."""
        slots = asyncio.Semaphore(most_open) if most_open is not None else None
        async with asyncio.TaskGroup() as tasks:
            for place, (number, arrival_s) in enumerate(self._mine(self._arrivals())):
                if arrival_s >= self._end_s:
                    return
                request = draw_request(self._work, number, self._server.dialect, self._server.model)
                if slots is not None:
                    await slots.acquire()
                while (wait_s := arrival_s - time.perf_counter()) > 0:  # noqa: ASYNC110 - timers may be a little early
                    await asyncio.sleep(wait_s)
                due_s = arrival_s if slots is None else max(arrival_s, time.perf_counter())
                if due_s >= self._end_s and most_open is not None and place >= most_open:
                    return
                tasks.create_task(self._answer(request, due_s, slots))

    def _mine(self, arrivals: Iterator[float]) -> Iterator[tuple[int, float]]:
        """Numbers and arrivals of this part's requests; every process draws those of all."""
        return itertools.islice(enumerate(arrivals), self._part.number, self._work.num_requests, self._part.of)

    def _arrivals(self) -> Iterator[float]:
        start_s, rate_per_s = self._part.start_s, self._work.rate_per_s
        if rate_per_s is None:
            return itertools.repeat(start_s)
        rng = random.Random(self._work.seed)
        return itertools.accumulate((rng.expovariate(rate_per_s) for _ in itertools.count()), initial=start_s)

    async def _answer(self, request: PlannedRequest, due_s: float, slots: asyncio.Semaphore | None) -> None:
        cut_s = self._end_s + _GRACE_S - time.perf_counter()
        may_be_cut = request.leave_after_s is None or request.leave_after_s > cut_s
        if may_be_cut:
            request = replace(request, leave_after_s=cut_s)
        answer = await send(self._server, request, due_s, self._timeout_s)
        has_left = request.leave_after_deltas is not None and len(answer.deltas_s) >= request.leave_after_deltas
        if answer.left and may_be_cut and not has_left:
            answer = replace(answer, left=False, was_cut=True)
        self._answers.append(answer)
        if slots is not None:
            slots.release()
