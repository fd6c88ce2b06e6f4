"""Ctrl-C between steps instead of in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold KeyboardInterrupt back until the block has ended, so that records changed inside it stay whole.

    Only where Python's own handler is in place and this is the main thread: no other can be interrupted.
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
