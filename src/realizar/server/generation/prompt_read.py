"""`PromptRead`: how much of a prompt has been read, as streams tell it in llama.cpp's form to requests that ask."""

from __future__ import annotations

import time
from typing import Self

import msgspec

from realizar.outputs import PromptProgress
from realizar.server.errors import refused


class PromptRead(msgspec.Struct):
    """llama.cpp's figures of a prompt that is being read.

    Attributes:
        total: tokens of the prompt. cache: those found in the cache. processed: those read, cached ones included.
        time_ms: milliseconds since the request was queued.
    """

    total: int
    cache: int
    processed: int
    time_ms: int

    @classmethod
    def of(cls, progress: PromptProgress, started_s: float) -> Self:
        """The figures of the engine. Args: started_s: time at which the request was queued, of `time.monotonic`."""
        elapsed_ms = round((time.monotonic() - started_s) * 1000)
        return cls(progress.num_tokens, progress.num_cached_tokens, progress.num_read, elapsed_ms)


def check_progress(wanted: bool | None, *, stream: bool | None) -> bool:
    """True if a request asks for progress. Raises ApiError: 400; a whole answer has no place for it."""
    if wanted and not stream:
        raise refused("return_progress needs stream to be true", "return_progress", "invalid_value")
    return bool(wanted)
