"""Progress of several prompts, reported to a callback or on a line of the terminal."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from realizar.engine.frontend.async_stream import AsyncStream
from realizar.errors import InvalidRequestError

PromptProgress: TypeAlias = "Callable[[int, int], None]"
"""A callback: its arguments are the number of finished prompts and the number of all prompts."""

_INTERVAL_S = 0.1


def wanted_progress(progress: PromptProgress | bool | None, use_tqdm: bool | None) -> PromptProgress | bool | None:
    """The progress that a caller wants; `use_tqdm` is vLLM's name for True and False of `progress`.

    It raises InvalidRequestError if both are given, or `use_tqdm` is neither True, False nor None.
    """
    if use_tqdm is None:
        return progress
    if not isinstance(use_tqdm, bool):
        raise InvalidRequestError("use_tqdm must be True or False; progress= takes a callback", "use_tqdm")
    if progress is not None:
        raise InvalidRequestError("progress and use_tqdm mean the same; give one of them", "use_tqdm")
    return use_tqdm


class ProgressReporter:
    """Reports the number of finished requests at intervals, and once at the end.

    Args:
        wanted: a callback; True for a line on stderr, False for no report; None for the line if stderr is a terminal
            and there are several requests.
        streams: the requests that are open or done; the list may grow.
    """

    def __init__(self, wanted: PromptProgress | bool | None, streams: Sequence[AsyncStream], total: int) -> None:
        self._streams, self._total = streams, total
        self._report: PromptProgress | None = None
        if callable(wanted):
            self._report = wanted
        elif wanted or (wanted is None and total > 1 and sys.stderr.isatty()):
            self._report = _Line()

    async def run(self) -> None:
        """Report at intervals until it is cancelled."""
        while self._report is not None:
            done = sum(stream.done for stream in self._streams)
            if done < self._total:
                self._report(done, self._total)
            await asyncio.sleep(_INTERVAL_S)

    def end(self) -> None:
        if self._report is not None and self._total:
            self._report(self._total, self._total)


class _Line:
    def __init__(self) -> None:
        self._started_s = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        seconds = time.monotonic() - self._started_s
        left = f", about {seconds / done * (total - done):.0f} s left" if 0 < done < total else ""
        end = "\n" if done == total else ""
        sys.stderr.write(f"\r{done} of {total} prompts, {seconds:.0f} s{left}\x1b[K{end}")
        sys.stderr.flush()
