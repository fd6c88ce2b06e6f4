"""Malformed files: bounds on what opening one may cost, and the message that it is refused with."""

from __future__ import annotations

import resource
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from realizar.checkpoint.open import open_checkpoint
from realizar.errors import CheckpointError

MAX_SECONDS = 60.0  # against a loop as long as a count in the file says
MAX_BYTES = 64 << 20
MAX_RSS = MAX_BYTES // (1 if sys.platform == "darwin" else 1024)  # ru_maxrss counts bytes there, KiB here


def refused(path: Path, open_file: Callable[[Path], object] = open_checkpoint) -> str:
    """The message, one short line, after checking that saying it took little time and memory."""
    peak_before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(CheckpointError) as refusal:
        open_file(path)
    assert time.process_time() - started < MAX_SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before < MAX_RSS
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            open_file(path)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
    message = str(refusal.value)
    assert "\n" not in message
    assert len(message) < 600
    return message
