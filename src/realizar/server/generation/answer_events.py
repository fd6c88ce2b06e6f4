"""`AnswerEvents` brings an answer to its client in the form that a dialect's `Encoder` writes, or as a whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar

from starlette.requests import Request

from realizar.engine.clients.async_stream import AsyncStream
from realizar.outputs import ChoiceDelta, RequestOutput
from realizar.server.errors import ApiError, to_api_error
from realizar.server.http.disconnects import unless_disconnected
from realizar.server.http.request import note
from realizar.server.http.request_memory import RequestLease
from realizar.server.http.sse import EventStream
from realizar.server.metrics import Metrics
from realizar.server.settings import ServerSettings

D = TypeVar("D")  # what an answer gains in a step
D_co = TypeVar("D_co", covariant=True)


class Run(Protocol[D_co]):
    @property
    def notes(self) -> dict[str, Any]:
        """Figures for the request's line in the log, at any time."""

    def deltas(self) -> AsyncGenerator[D_co]:
        """What the answer gains, as it comes."""


class Encoder(Generic[D]):
    """Writes the events of a streamed answer in a dialect's form. What is returned holds any number of them.

    Attributes:
        shows_waiting: True if `waiting` has events.
    """

    shows_waiting = False

    def grown(self, delta: D) -> bytes:
        """The events of a delta, and before the first one those that begin an answer."""
        raise NotImplementedError

    def last(self) -> bytes:
        return b""

    def waiting(self) -> bytes:
        """The events of a pause before the first delta, as long as one between pings."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        """The dialect's own events of an error that ends the answer."""
        return b""


class AnswerEvents(Generic[D]):
    """Brings one answer to its client, streamed or whole. The run's figures are noted however it ends."""

    def __init__(self, request: Request, run: Run[D], settings: ServerSettings) -> None:
        self._request, self._run, self._settings = request, run, settings

    def stream(self, encoder: Encoder[D]) -> EventStream:
        """The answer as a stream of events."""
        return EventStream(self._events(encoder), self._settings.ping_interval_s, self._settings.write_timeout_s)

    async def whole(self, take_in: Callable[[D], object]) -> None:
        """Take in all deltas. Raises ClientDisconnectedError: the client disconnected first; the run has ended."""
        try:
            await unless_disconnected(self._request.receive, self._take_all(take_in))
        finally:
            note(self._request, **self._run.notes)

    async def _take_all(self, take_in: Callable[[D], object]) -> None:
        async with aclosing(self._run.deltas()) as deltas:
            async for delta in deltas:
                take_in(delta)

    async def _events(self, encoder: Encoder[D]) -> AsyncGenerator[bytes]:
        try:
            async with aclosing(self._run.deltas()) as deltas:
                if encoder.shows_waiting:
                    first = asyncio.ensure_future(anext(deltas))
                    try:
                        while not (await asyncio.wait((first,), timeout=self._settings.ping_interval_s))[0]:
                            yield encoder.waiting()
                    finally:
                        if not first.done():
                            first.cancel()
                            await asyncio.wait((first,))
                    yield encoder.grown(first.result())
                async for delta in deltas:
                    if data := encoder.grown(delta):
                        yield data
            if data := encoder.last():
                yield data
        except Exception as error:  # noqa: BLE001 - a stream that began may say so itself
            api_error = to_api_error(error)
            if data := encoder.failed(api_error):
                yield data
            raise api_error from None
        finally:
            note(self._request, **self._run.notes)


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
