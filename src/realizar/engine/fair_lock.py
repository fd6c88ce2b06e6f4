"""A lock that is handed over in the order of asking."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """Context manager. A thread that takes it again and again, as one that drives an engine does, starves nobody.

    `threading.Lock` would: who releases it and takes it at once keeps it, because the woken thread comes too late.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._queue: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._guard:
            if not self._held:
                self._held = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._queue.append(turn)
        turn.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._guard:
            if self._queue:
                self._queue.popleft().release()
            else:
                self._held = False
