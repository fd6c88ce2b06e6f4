"""`Timeline`: where the time of the engine's thread goes in a step; `AnswerTimes`: how long grammars' questions take.

Neither is for use outside measurements: a timeline puts itself around methods, and another process watches the memory
that the grammars' processes share. time_grammar_steps.py shows both, with --timeline and --questions.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np

from realizar.structured.workers.mask_memory import MaskMemory

_MOST_ANSWERS = 4000
_PIPE_BYTES = 1 << 20


class Timeline:
    """Times of parts, each without the parts inside it."""

    def __init__(self) -> None:
        self._stack: list[float] = []
        self._taken: defaultdict[str, list[float]] = defaultdict(list)

    @contextmanager
    def around(self, parts: Sequence[tuple[type, str, str]]) -> Iterator[None]:
        """Time methods while this lasts. `parts` are classes, names of their methods, and what they are called."""
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in parts]
        for (owner, name, method), (_, _, label) in zip(before, parts, strict=True):
            setattr(owner, name, self._timed(method, label))
        try:
            yield
        finally:
            for owner, name, method in before:
                setattr(owner, name, method)

    def clear(self) -> None:
        self._taken.clear()

    def lines(self, num_steps: int) -> list[str]:
        """A line for each part: its milliseconds a step, calls a step, and the median and longest of a call."""
        lines = []
        for label, taken in sorted(self._taken.items(), key=lambda item: -sum(item[1])):
            each = np.array(taken) * 1e3
            share = f"{each.sum() / num_steps:7.3f} ms a step, {len(each) / num_steps:5.2f} calls"
            lines.append(f"{label:>24}: {share}, median {np.median(each):.3f}, 95 % {np.percentile(each, 95):.3f}")
        return lines

    def _timed(self, method: Callable[..., Any], label: str) -> Callable[..., Any]:
        stack = self._stack

        @wraps(method)
        def timed(*arguments: Any, **named: Any) -> Any:
            started_s = time.perf_counter()
            stack.append(0.0)
            try:
                return method(*arguments, **named)
            finally:
                whole_s = time.perf_counter() - started_s
                self._taken[label].append(whole_s - stack.pop())
                if stack:
                    stack[-1] += whole_s

        return timed


class AnswerTimes:
    """Another process that watches which questions are open; it takes one core while it lasts.

    Attributes:
        answers_s: seconds of each answer that it saw, once it has ended.
    """

    def __init__(self, memory: MaskMemory) -> None:
        self.answers_s: list[float] = []
        self._read, write = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            _watch(memory, write)
        os.close(write)

    def end(self) -> None:
        os.kill(self._pid, signal.SIGTERM)
        data = b""
        while part := os.read(self._read, _PIPE_BYTES):
            data += part
        os.close(self._read)
        os.waitpid(self._pid, 0)
        self.answers_s = list(struct.unpack(f"{len(data) // 8}d", data))


def _watch(memory: MaskMemory, write: int) -> None:
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    since = np.zeros(memory.num_slots)
    asked = memory.asked.copy()
    answers: list[float] = []
    while not ended:
        now_s = time.perf_counter()
        now_asked, now_answered = memory.asked.copy(), memory.answered.copy()
        is_open = now_asked != now_answered
        new = now_asked != asked
        since[new] = now_s
        asked = now_asked
        done = ~is_open & (since > 0)
        if done.any():
            answers += (now_s - since[done]).tolist()
            since[done] = 0.0
    chosen = answers[:: max(1, len(answers) // _MOST_ANSWERS)]
    os.write(write, struct.pack(f"{len(chosen)}d", *chosen))
    os._exit(0)
