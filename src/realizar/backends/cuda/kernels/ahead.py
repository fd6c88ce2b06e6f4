"""Triton's kernels compiled by threads before they are launched: what launches would compile is taken from launches.

The launches that are planned start nothing (`launched.planning`). Triton compiles mostly without the interpreter's
lock, and keeps what it has compiled for later launches of the process.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from realizar.backends.cuda.kernels.launched import planning
from realizar.backends.cuda.launch import Launch, StepKind
from realizar.backends.machine import num_processors

_MOST_THREADS = 12


class PlannedCompiles:
    """What one thread plans, and others compile; a kind of step is waited for by `await_kind`.

    `may_begin` is set when nothing else wants the interpreter's lock.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(min(_MOST_THREADS, num_processors()), "realizar-triton")
        self._seen: set[Hashable] = set()
        self._begun: list[Future[Any]] = []
        self._planned: dict[StepKind, int] = {}  # how many had begun when a kind was planned
        self._expected: frozenset[StepKind] | None = None  # not known yet
        self._changed = threading.Condition()
        self.may_begin = threading.Event()
        self._is_closed = False

    def await_begin(self) -> bool:
        """Wait until `may_begin`; False where it was closed before."""
        self.may_begin.wait()
        return not self._is_closed

    def plan(self, kinds: Sequence[tuple[StepKind, Sequence[Launch]]], *, whole: int) -> None:
        """Have compiled what launches start for kinds, in order.

        After the first `whole` kinds only launches are asked that have brought something until then, as layers are much
        alike; what is missed so is compiled where it is launched.
        """
        useful: set[int] = set()
        self._expect(kind for kind, _ in kinds)
        try:
            with planning(self._begin):
                for number, (kind, launches) in enumerate(kinds):
                    for launch in launches:
                        if self._is_closed:
                            return
                        if number >= whole and id(launch) not in useful:
                            continue
                        before = len(self._begun)
                        launch.run(kind)
                        if len(self._begun) > before:
                            useful.add(id(launch))
                    with self._changed:
                        self._planned[kind] = len(self._begun)
                        self._changed.notify_all()
        finally:
            self.end()

    def end(self) -> None:
        """Nothing more is planned: nobody waits for a kind that was not."""
        self._expect(())
        self._pool.shutdown(wait=False)

    def close(self) -> None:
        """Compile nothing more than what is being compiled; the thread that plans ends."""
        self._is_closed = True
        self.may_begin.set()
        self._expect(())
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _expect(self, kinds: Iterable[StepKind]) -> None:
        with self._changed:
            self._expected = frozenset(kinds)
            self._changed.notify_all()

    def _is_settled(self, kind: StepKind) -> bool:
        return kind in self._planned or (self._expected is not None and kind not in self._expected)

    def await_kind(self, kind: StepKind) -> None:
        """Wait until what was planned up to a kind is compiled; at once for kinds that are not planned in the end.

        What does not compile here does not where it is launched, which says so.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled(kind))
            begun = self._begun[: self._planned.get(kind, 0)]
        wait(begun)

    def is_compiled(self, kind: StepKind) -> bool:
        """True if `await_kind` does not wait."""
        with self._changed:
            begun = self._begun[: self._planned.get(kind, 0)]
            return self._is_settled(kind) and all(each.done() for each in begun)

    def _begin(self, kernel: Any, grid: Any, *arguments: Any, **options: Any) -> None:
        named = tuple((name, str(value)) for name, value in options.items())
        key = id(kernel), tuple(map(_sort_of, arguments)), named
        if key not in self._seen:
            self._seen.add(key)
            self._begun.append(self._pool.submit(kernel.run, *arguments, grid=grid, warmup=True, **options))


def _sort_of(argument: Any) -> Hashable:
    """What Triton compiles for of an argument, roughly: it may be finer than Triton's own."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype
    return argument if isinstance(argument, int) else type(argument)
