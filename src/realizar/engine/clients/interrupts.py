"""`interrupts_deferred` moves Ctrl-C from the middle of a step to its end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold KeyboardInterrupt back until the block has ended, so that records changed inside it stay consistent.

    This applies to the main thread with Python's own handler; no other thread can be interrupted.
    """
    if threading.current_thread() is not threading.main_thread() or not _default_handler():
        yield
        return
    interrupted = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if interrupted:
        raise KeyboardInterrupt


def _default_handler() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler
