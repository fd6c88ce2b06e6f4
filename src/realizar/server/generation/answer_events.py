"""Answers of the engine: their deltas as they come, and the figures of a request for its line in the log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import Any, Protocol, TypeVar

from starlette.requests import Request

from realizar.engine.clients.async_stream import AsyncStream
from realizar.outputs import ChoiceDelta, RequestOutput
from realizar.server.http.disconnects import unless_disconnected
from realizar.server.http.request import note
from realizar.server.http.request_memory import RequestLease
from realizar.server.metrics import Metrics

T = TypeVar("T")


class Noted(Protocol):
    """A request in the engine, which has figures for its line in the log at any time."""

    @property
    def notes(self) -> dict[str, Any]: ...


async def whole_answer(request: Request, run: Noted, work: Coroutine[Any, Any, T]) -> T:
    """Wait for an answer that is not streamed; the run's figures are noted however it ends.

    Raises:
        ClientDisconnectedError: the client disconnected first; the work was cancelled and has ended.
    """
    try:
        return await unless_disconnected(request.receive, work)
    finally:
        note(request, **run.notes)


def timing_notes(output: RequestOutput | None) -> dict[str, float]:
    """The times of a finished request, for its line in the log; empty if it has no output."""
    if output is None:
        return {}
    timings = output.timings
    return {"queue_s": timings.queue_s, "first_token_s": timings.first_token_s - timings.arrival_s}


def replica_notes(streams: Iterable[AsyncStream]) -> dict[str, str]:
    """The names of the replicas that have a request's prompts, for its line in the log; empty without replicas."""
    names = ",".join(sorted({stream.replica for stream in streams}))
    return {"replica": names} if names else {}


async def deltas_of(
    stream: AsyncStream, metrics: Metrics, lease: RequestLease, top: int, enough: Callable[[], bool] = lambda: False
) -> AsyncGenerator[ChoiceDelta]:
    """Iterate the deltas of an open request and count them. The request is closed when the consumer stops.

    Args:
        lease: counts the log-probabilities, which are kept until the end, each with `top` others.
        enough: called after each delta; True ends the request, since its rest is not wanted.
    """
    last_s: dict[int, float] = {}
    started_s = time.monotonic()
    first_s: float | None = None
    try:
        async for delta in stream:
            if delta.prompt_progress is not None:
                yield delta
                continue
            now = time.monotonic()
            first_s = now if first_s is None else first_s
            if delta.token_ids:
                if delta.choice in last_s:
                    metrics.tokens_came(len(delta.token_ids), now - last_s[delta.choice])
                last_s[delta.choice] = now
            if num_logprobs := len(delta.logprobs):
                lease.add_logprobs(num_logprobs, top)
            yield delta
            if enough() and not stream.done:
                metrics.stopped(len(last_s), first_s - started_s, now - started_s)
                return
        metrics.ended(await stream.result())
    except (GeneratorExit, asyncio.CancelledError):
        metrics.aborted()
        raise
    finally:
        stream.close()
