"""The processes that put a mix on a server: one, or several where one core would be the bound."""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from realizar.bench.mix.dialects import Dialect
from realizar.bench.mix.requests import MixWork
from realizar.bench.mix.run import Part, Served, run_part
from realizar.bench.serve_client import Target
from realizar.errors import CapacityError, InvalidRequestError

_CORES_A_GENERATOR = 4
_MOST = 8
_START_S = 0.2  # until all processes have taken up their parts


def default_generators() -> int:
    """Processes for a load, where the machine also runs the server: one for each four cores, 8 at the most."""
    return max(1, min(_MOST, (os.cpu_count() or 1) // _CORES_A_GENERATOR))


@dataclass(frozen=True, slots=True)
class MixRun:
    """One load on one server.

    Attributes:
        server: its name. label: of the load.
        start_s: of `time.perf_counter`.
        duration_s: in which tokens are counted: the load's seconds, or until the last end.
        served: in no order.
        busy: share of a core that each generator took, the highest first.
    """

    server: str
    label: str
    start_s: float
    duration_s: float
    served: list[Served]
    busy: tuple[float, ...]


class Generators:
    """Processes that send requests and time the answers. Use it as a context manager.

    Args:
        count: of processes; one works within this process.

    Raises:
        InvalidRequestError: there is none.
    """

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(self, target: Target, dialect: Dialect, work: MixWork, label: str, timeout_s: float) -> MixRun:
        """Put a load on a server and wait for all answers.

        Raises:
            InvalidRequestError: the target's address is none.
            UnknownFieldsError: the server does not know a field of a kind.
            CapacityError: a process of the generator died.
        """
        if self._pool is None:
            start_s = time.perf_counter()
            results = [run_part(target, dialect, work, Part(0, 1, start_s), timeout_s)]
        else:
            start_s = time.perf_counter() + _START_S
            parts = [Part(number, self._count, start_s) for number in range(self._count)]
            futures = [self._pool.submit(run_part, target, dialect, work, part, timeout_s) for part in parts]
            try:
                results = [future.result() for future in futures]
            except BrokenProcessPool:
                raise CapacityError("a process of the load generator died") from None
        served = [each for result in results for each in result.served]
        last_s = max((each.ended_s for each in served), default=start_s)
        duration_s = work.seconds if work.seconds is not None else max(last_s - start_s, 1e-9)
        busy = tuple(sorted((result.cpu_share for result in results), reverse=True))
        return MixRun(target.name, label, start_s, duration_s, served, busy)
